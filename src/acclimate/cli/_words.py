"""What several commands share: words of a list, and the type of argparse's commands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = Any


def listed(option: str, text: str) -> list[str]:
    """A list that has something in it, and nothing twice."""
    from ..errors import ConfigError

    found = words(text)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"--{option} {text!r}: name one or several, separated by commas, each once.")
    return found


def words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def numbers(option: str, text: str) -> list[int]:
    """A list of whole numbers."""
    from ..errors import ConfigError

    try:
        return [int(word) for word in listed(option, text)]
    except ValueError:
        raise ConfigError(f"--{option} {text}: give whole numbers, separated by commas.") from None


def method_list(text: str) -> list[Any]:
    """Methods with or without options: `dct,dct:generator=False:lr=0.01`."""
    import ast

    from ..errors import ConfigError

    chosen: list[Any] = []
    for word in listed("methods", text):
        name, *options = word.split(":")
        if not options:
            chosen.append(name)
            continue
        if not all("=" in option for option in options):
            raise ConfigError(f"--methods {word}: options are written name:option=value:option=value.")
        values: dict[str, Any] = {}
        for option, value in (option.split("=", 1) for option in options):
            try:
                values[option] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                values[option] = value  # a word
        chosen.append((name, values))
    return chosen
