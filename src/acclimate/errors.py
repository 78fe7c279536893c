"""Every error that acclimate raises on purpose, so that a caller can catch one kind and let the rest through."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral


class AcclimateError(Exception):
    """Base of all errors of this library."""


class InputError(AcclimateError, ValueError):
    """A batch of images that cannot be used. The adapter is as it was before the call."""


class UnreadableError(InputError):
    """A file that looks like an image by its name and cannot be decoded."""


class ModelError(AcclimateError, TypeError):
    """A model that cannot be adapted. It is returned to the caller untouched."""


class ConfigError(AcclimateError, ValueError):
    """An unknown method or option, or a value that an option cannot take."""


class StateError(AcclimateError):
    """A state file that cannot be used, or an operation that the adapter's state does not allow."""


class NonFiniteError(AcclimateError, ArithmeticError):
    """An update was about to write NaN or Inf into the model. It was not applied."""


class ConformanceError(AcclimateError, AssertionError):
    """A method does not keep the contract that `acclimate.check_method` verifies."""


def require_between(low: float, high: float, *, optional: bool = False, **options: float | None) -> None:
    """Refuse an option outside of its range; where None stands for a default, it is `optional`."""
    for name, value in options.items():
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            limits = f"a number of {low} or more" if math.isinf(high) else f"a number from {low} to {high}"
            raise ConfigError(f"{name}={value!r}: give {limits}.")


def require_whole(least: int, **options: object) -> None:
    """Refuse an option that is not a whole number of at least so much; numpy's count as well."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ConfigError(f"{name}={value!r}: give a whole number of {least} or more.")


def nearest(name: str, known: Iterable[str], cutoff: float) -> str:
    """The hint of an error about an unknown name, or nothing if no known one is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def some(items: Iterable[str], separator: str = ", ", most: int = 5) -> str:
    """The first of many names, and how many more there are: for an error that cannot list them all."""
    each = list(dict.fromkeys(items))
    return separator.join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")
