"""The numbers that the DCT paper reports (Tang et al., ACM MM 2024), as data, each table with what is doubtful about it.

They are there to be shown beside own results, and never instead of them. Accuracies are in per cent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ...errors import ConfigError, StateError
from ...evaluation.published import PublishedTable, require_known


@dataclass(frozen=True)
class Figure:
    """Describes a figure of the paper. None has its numbers printed."""

    key: str
    label: str
    printed: bool
    shows: str


@dataclass(frozen=True)
class Claim:
    """Holds a number in the paper's text."""

    table: str | None  # key of the table that it is about
    says: str
    value: float
    unit: str
    doubt: str | None


def tables() -> dict[str, PublishedTable]:
    """Return all tables, by key."""
    return {key: _table(key, values) for key, values in _paper()["tables"].items()}


def reported(key: str) -> PublishedTable:
    """Return one table."""
    if key in figures():
        raise ConfigError(f"{key!r} is a figure of the paper, and its numbers are not printed: {figures()[key].shows}")
    return tables()[require_known(key, tables(), "table of the paper")]


def figures() -> dict[str, Figure]:
    """Return what the paper shows in figures, by key."""
    return {key: Figure(key=key, **values) for key, values in _paper()["figures"].items()}


def claims() -> list[Claim]:
    """Return the numbers in the paper's text."""
    return [Claim(**values) for values in _paper()["claims"]]


@cache
def _paper() -> dict[str, Any]:
    file = files(__package__).joinpath("reported.json")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StateError(f"{file} is damaged ({error}): install acclimate again.") from None


def _table(key: str, values: Mapping[str, Any]) -> PublishedTable:
    lists = {name: tuple(values[name]) for name in ("columns", "doubts")}
    rows = {name: {m: tuple(row) for m, row in values[name].items()} for name in ("rows", "deviations", "commented_out")}
    means = {name: dict(values[name]) for name in ("averages", "average_deviations")}
    return PublishedTable(key=key, **{**values, **lists, **rows, **means})
