"""The errors that acclimate raises on purpose, one class per kind, so that a caller can catch a single kind."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral


class AcclimateError(Exception):
    """The base class of all errors of this library."""


class InputError(AcclimateError, ValueError):
    """An error about a batch of images that cannot be used. The adapter keeps the state from before the call."""


class UnreadableError(InputError):
    """An error about a file whose name is that of an image, but that cannot be decoded."""


class ModelError(AcclimateError, TypeError):
    """An error about a model that cannot be adapted. The model is not changed."""


class ConfigError(AcclimateError, ValueError):
    """An error about an unknown method or option, or about an invalid value of an option."""


class StateError(AcclimateError):
    """An error about a state file that cannot be used, or an operation that the adapter's state does not allow."""


class NonFiniteError(AcclimateError, ArithmeticError):
    """An error about an update that would write NaN or Inf into the model. The update is not applied."""


class ConformanceError(AcclimateError, AssertionError):
    """An error about a method that violates the contract that `acclimate.check_method` verifies."""


def first_line(error: BaseException, most: int = 200) -> str:
    """Return the first line of the message of an error, without its full stop: torch writes whole paragraphs."""
    text = str(error).strip().partition("\n")[0].rstrip(". ")
    return text if len(text) <= most else f"{text[:most]}..."


def require_between(low: float, high: float, *, optional: bool = False, **options: float | None) -> None:
    """Refuse options outside of the range from `low` to `high`. None is accepted if they are `optional`."""
    for name, value in options.items():
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            limits = f"a number of {low} or more" if math.isinf(high) else f"a number from {low} to {high}"
            raise ConfigError(f"{name}={value!r}: give {limits}.")


def require_whole(least: int, most: int = 2**63 - 1, /, *, optional: bool = False, **options: object) -> None:
    """Refuse options that are not whole numbers from `least` to `most`. None is accepted if they are `optional`.

    Integers of numpy are accepted.
    """
    for name, value in options.items():
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
            limits = f"of {least} or more" if most == 2**63 - 1 else f"from {least} to {most}"
            raise ConfigError(f"{name}={value!r}: give a whole number {limits}.")


def suggest(name: str, known: Iterable[str], cutoff: float) -> str:
    """Return a hint at the known name that is closest to an unknown one, or an empty string if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def printable(text: object) -> str:
    """Return a text in one line that any terminal can print. Other characters, which file names may have, are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def shorten_list(items: Iterable[str], separator: str = ", ", most: int = 5) -> str:
    """Join the first `most` distinct items, made printable, and say how many more there are."""
    each = [printable(item) for item in dict.fromkeys(items)]
    return separator.join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")
