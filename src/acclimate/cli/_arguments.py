"""Arguments that several commands share, and what is opened from them."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ._parser import MOST_PROCESSES, TINY, Parser, input_file, list_of, number, shown, whole, words

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ..data.catalog import Selection
    from ..data.domains import Domain
    from ..evaluation.testbed import Testbed

    Commands = argparse._SubParsersAction[Parser]
    Group = argparse._ArgumentGroup
else:
    Commands = Group = Any

CONSTANTS = ("imagenet-c", "cifar-10-c")
SEVERITY = whole(1, 5)


def new_command(commands: Commands, name: str, *, help: str, description: str, epilog: str) -> Parser:
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
        help="bundled, timm's name with its tag, a file of train-source, or a folder or name on the hub of a model of "
        "transformers; default: %(default)s",
    )
    group.add_argument(
        "--weights", type=input_file, metavar="FILE", help="local weights of a timm model, instead of a download"
    )
    group.add_argument(
        "--mean",
        type=list_of(number(), repeated=True),
        metavar="LIST",
        help="mean of the normalisation, if the model does not contain it: 0.5,0.5,0.5",
    )
    group.add_argument(
        "--std",
        type=list_of(number(TINY), repeated=True),
        metavar="LIST",
        help="standard deviation of the normalisation, in the same form",
    )


def add_data(group: Group) -> None:
    """Add the arguments that choose a data set."""
    group.add_argument(
        "--data", default="bundled", metavar="NAME", help="a name in `acclimate data list`; default: %(default)s"
    )
    group.add_argument("--root", metavar="DIR", help="the folder of the data set")
    add_labels(group)
    group.add_argument("--partial", action="store_true", help="take a data set that is not complete")


def add_labels(group: Group | Parser) -> None:
    """Add the argument that gives the labels of the images of a folder."""
    group.add_argument(
        "--labels",
        type=input_file,
        metavar="FILE",
        help="labels of a folder without sub-folders: a CSV file with the columns file and label, a class's name or index",
    )


def add_selection(group: Group, *, images: str = "images of each domain; default: all, of the bundled ones 512") -> None:
    """Add the arguments that choose domains and images of the data."""
    group.add_argument(
        "--corruptions",
        type=words,
        metavar="LIST",
        help="default: clean and every second one for the bundled images and a folder; all 15 for ImageNet-C and CIFAR-C; "
        "all that are in a tree of `acclimate corrupt`. clean: no corruption, one more domain of mixed and continual",
    )
    group.add_argument(
        "--severities",
        "--severity",
        type=list_of(SEVERITY),
        metavar="LIST",
        help="1 to 5; default: 5, or all that are in a tree of `acclimate corrupt`",
    )
    group.add_argument("--domains", type=words, metavar="LIST", help="domains of Office-Home (default: all), or of a folder")
    group.add_argument("--images", type=whole(1), metavar="N", help=images)
    add_constants(group)


def add_constants(group: Group) -> None:
    """Add the argument that chooses the strengths of corruptions."""
    group.add_argument(
        "--constants",
        choices=CONSTANTS,
        metavar="WHOSE",
        help="strengths of corruptions made on the fly: imagenet-c or cifar-10-c; default: by size, cifar-10-c up to 64 px",
    )


def add_device(group: Group | Parser) -> None:
    """Add the argument that chooses a device."""
    group.add_argument("--device", metavar="NAME", help="default: a GPU if there is one")


def add_workers(group: Group) -> None:
    """Add the argument that chooses how many processes load images."""
    group.add_argument(
        "--workers",
        type=whole(0, MOST_PROCESSES),
        metavar="N",
        help="processes that load images ahead; default: up to 4",
    )


def selection(given: argparse.Namespace) -> Selection:
    """Return the part of the data that the arguments select."""
    from ..data.catalog import Selection

    def chosen(name: str) -> Any:
        return getattr(given, name, None)

    return Selection(
        corruptions=chosen("corruptions"),
        severities=chosen("severities"),
        domains=chosen("domains"),
        images=chosen("images"),
        partial=bool(chosen("partial")),
        constants=chosen("constants"),
        labels=chosen("labels"),
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
        mean=given.mean,
        std=given.std,
        source_statistics=getattr(given, "source_statistics", None),
        needed=needed,
        device=given.device,
    )


def make_folder_of(file: str) -> None:
    """Make the folder of a file that will be written at the end, so that a wrong path is found at once."""
    os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)


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


def methods(given: Iterable[str]) -> list[Any]:
    """Return methods, with or without options, and files of methods: `dct`, `dct:generator=False:lr=0.01`, `mine.py`."""
    import ast

    from ..core.registry import read_file
    from ..errors import ConfigError

    chosen: list[Any] = []
    for word in given:
        name, *options = word.split(":")
        if not all("=" in option for option in options):
            raise ConfigError(f"--methods {shown(word)}: options are written name:option=value:option=value.")
        values: dict[str, Any] = {}
        for option, value in (option.split("=", 1) for option in options):
            try:
                values[option] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                values[option] = value  # text without quotes
        for each in read_file(name) if name.endswith(".py") else [name]:
            chosen.append((each, values) if values else each)
    return chosen
