"""Arguments that several commands share, and functions that parse their text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

    from ..data.catalog import Selection
    from ..data.domains import Domain
    from ..evaluation.testbed import Testbed

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    Group = argparse._ArgumentGroup
else:
    Commands = Group = Any


def new_command(commands: Commands, name: str, *, help: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Add a command whose epilog keeps its line breaks."""
    return commands.add_parser(
        name, help=help, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_model(group: Group, default: str | None = "bundled") -> None:
    """Add the arguments that choose a source model."""
    group.add_argument(
        "--model",
        default=default,
        metavar="NAME",
        help="bundled, timm's name with its tag, or a file of train-source; default: %(default)s",
    )
    group.add_argument("--weights", metavar="FILE", help="local weights of a timm model, instead of a download")
    group.add_argument(
        "--mean", metavar="LIST", help="mean of the normalisation, if the model does not contain it: 0.5,0.5,0.5"
    )
    group.add_argument("--std", metavar="LIST", help="standard deviation of the normalisation, in the same form")


def add_data(group: Group) -> None:
    """Add the arguments that choose a data set."""
    group.add_argument(
        "--data", default="bundled", metavar="NAME", help="a name in `acclimate data list`; default: %(default)s"
    )
    group.add_argument("--root", metavar="DIR", help="the folder of the data set")
    group.add_argument("--partial", action="store_true", help="take a data set that is not complete")


def add_selection(group: Group, *, images: str = "images of each domain; default: all, of the bundled ones 2000") -> None:
    """Add the arguments that choose domains and images of the data."""
    group.add_argument(
        "--corruptions",
        metavar="LIST",
        help="default: all 15, of the bundled images one of each group; clean: no corruption",
    )
    group.add_argument("--severities", "--severity", metavar="LIST", help="1 to 5; default: 5, of the bundled images 2")
    group.add_argument("--domains", metavar="LIST", help="domains of Office-Home; default: all")
    group.add_argument("--images", type=int, metavar="N", help=images)
    group.add_argument(
        "--constants",
        metavar="WHOSE",
        help="strengths of corruptions made on the fly: imagenet-c or cifar-10-c; default: by size, for the bundled images "
        "imagenet-c",
    )


def selection(given: argparse.Namespace) -> Selection:
    """Return the part of the data that the arguments select."""
    from ..data.catalog import Selection

    def chosen(name: str) -> Any:
        return getattr(given, name, None)

    return Selection(
        corruptions=chosen("corruptions") and names("corruptions", given.corruptions),
        severities=chosen("severities") and integers("severities", given.severities),
        domains=chosen("domains") and names("domains", given.domains),
        images=chosen("images"),
        partial=bool(chosen("partial")),
        constants=chosen("constants"),
    )


def open_given(given: argparse.Namespace, needed: Collection[str] | None = None) -> Testbed:
    """Open the model and the data that the arguments name."""
    from ..evaluation.testbed import open_testbed

    return open_testbed(
        given.model,
        given.data,
        given.root,
        selection(given),
        weights=given.weights,
        mean=given.mean and floats("mean", given.mean),
        std=given.std and floats("std", given.std),
        source_statistics=split(getattr(given, "source_statistics", None)) or None,
        needed=needed,
        device=given.device,
    )


def clean_source(testbed: Testbed) -> Domain:
    """Return the clean images of a testbed, for what is learned from the source data."""
    from ..errors import ConfigError

    data = testbed.data
    if data.held_out is not None:
        return data.held_out
    if data.domains[0].key.severity is not None:
        return data.domain()
    if len(data.domains) > 1:
        raise ConfigError(f"{data.name} has several domains: take the clean source images alone (--domains NAME).")
    return data.domains[0]


def split(text: str | None) -> list[str]:
    """Return the words of a list that is separated by commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def names(option: str, text: str) -> list[str]:
    """Return the words of a list that must not be empty and must not contain a word twice."""
    from ..errors import ConfigError

    found = split(text)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"--{option} {text!r}: name one or several, separated by commas, each once.")
    return found


def integers(option: str, text: str) -> list[int]:
    """Return a list of whole numbers."""
    from ..errors import ConfigError

    found = names(option, text)
    try:
        return [int(word) for word in found]
    except ValueError:
        raise ConfigError(f"--{option} {text}: give whole numbers, separated by commas.") from None


def floats(option: str, text: str) -> list[float]:
    """Return a list of numbers, which may contain a number several times."""
    from ..errors import ConfigError

    try:
        return [float(word) for word in split(text)]
    except ValueError:
        raise ConfigError(f"--{option} {text}: give numbers, separated by commas.") from None


def methods(text: str) -> list[Any]:
    """Return methods, with or without options, and files of methods: `dct,dct:generator=False:lr=0.01,mine.py`."""
    import ast

    from ..core.registry import read_file
    from ..errors import ConfigError

    chosen: list[Any] = []
    for word in names("methods", text):
        name, *options = word.split(":")
        if not all("=" in option for option in options):
            raise ConfigError(f"--methods {word}: options are written name:option=value:option=value.")
        values: dict[str, Any] = {}
        for option, value in (option.split("=", 1) for option in options):
            try:
                values[option] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                values[option] = value  # text without quotes
        for each in read_file(name) if name.endswith(".py") else [name]:
            chosen.append((each, values) if values else each)
    return chosen
