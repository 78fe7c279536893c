"""A parser whose errors are one sentence, and the types of arguments: numbers with bounds, lists, and paths.

Whatever can be said without torch is said here, when the arguments are parsed: before a model or a data set is opened, and
before a folder is made.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import Any, NoReturn

from ..core.processes import MOST_PROCESSES as MOST_PROCESSES
from ..errors import ConfigError, suggest

MOST = 2**31 - 1  # images, steps, epochs: more would not fit where they are counted
LARGEST, TINY = 1e6, 1e-6  # of numbers that are not whole
LARGEST_SEED = 2**63 - 1  # that every generator of random numbers takes


class Parser(argparse.ArgumentParser):
    """A parser that raises a `ConfigError` of one sentence, and suggests a name for an unknown one."""

    complete: Callable[[], None] | None = None  # adds the rest of the arguments, when the parser is used

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing all arguments."""
        end = "" if message.endswith((".", "?")) else "."
        raise ConfigError(f"{message}{end} `{self.prog} --help` lists the arguments.")

    def completed(self) -> Parser:
        """Return this parser with all of its arguments."""
        complete, self.complete = self.complete, None
        if complete is not None:
            complete()
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments, and refuse an unknown one here, where the similar ones are known."""
        self.completed()
        given, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            near = suggest(word, self._option_string_actions, 0.6) if word.startswith("-") else ""
            self.error(f"unrecognized argument {shown(unknown[0])}.{near}")
        return given, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file)  # argparse would ignore that the disk is full, or the reader gone

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = suggest(str(value), known, 0.5)
            raise argparse.ArgumentError(action, f"{shown(value)} is unknown.{near} Known: {', '.join(known)}.")


def shown(value: object) -> str:
    """Return a value as it was given, in quotes, without its middle if it is long."""
    text = str(value)
    return repr(text if len(text) <= 200 else f"{text[:90]}...{text[-90:]}")


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return a function that reads a whole number of at least `least` and at most `most`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number from {least} to {most}")
        return number

    return read


def number(least: float = -LARGEST, most: float = LARGEST) -> Callable[[str], float]:
    """Return a function that reads a number of at least `least` and at most `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a number from {least:g} to {most:g}")
        return value

    return read


seed = whole(0, LARGEST_SEED)


def split(text: str) -> list[str]:
    """Return the words of a list that is separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def words(text: str) -> list[str]:
    """Return the words of a list that must not be empty and must not contain a word twice."""
    return list_of(str)(text)


def list_of(read: Callable[[str], Any], *, repeated: bool = False) -> Callable[[str], list[Any]]:
    """Return a function that reads a list of values, all different unless they may be `repeated`."""

    def read_all(text: str) -> list[Any]:
        values = [read(word) for word in split(text)]
        if not values or (len(set(values)) < len(values) and not repeated):
            once = "" if repeated else ", each once"
            raise argparse.ArgumentTypeError(f"{shown(text)}: give one or several, separated by commas{once}")
        return values

    return read_all


def input_file(text: str) -> str:
    """Return the path of a file that exists."""
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{shown(text)} does not exist")
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{shown(text)} is a {_kind(text)}: give a file")
    return text


def _kind(path: str) -> str:
    return "folder" if os.path.isdir(path) or not path else "device, or a pipe"


def input_files(text: str) -> list[str]:
    """Return the paths of files that exist, separated by commas."""
    return [input_file(word) for word in words(text)]


def input_folder(text: str) -> str:
    """Return the path of a folder that exists."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{shown(text)} {'is not a folder' if os.path.exists(text) else 'does not exist'}")
    return text


def output_file(text: str) -> str:
    """Return the path of a file that can be written, as far as that can be told before."""
    if not text or (os.path.exists(text) and not os.path.isfile(text)):
        raise argparse.ArgumentTypeError(f"{shown(text)} is a {_kind(text)}: give a file")
    _require_writable(text, os.path.dirname(os.path.abspath(text)))
    return text


def output_folder(text: str) -> str:
    """Return the path of a folder that can be written or made, as far as that can be told before."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a folder")
    _require_writable(text, os.path.abspath(text))
    return text


def _require_writable(text: str, folder: str) -> None:
    while not os.path.lexists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{shown(text)} cannot be written: {shown(folder)} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{shown(text)} cannot be written: permission denied")
