"""The numbers that the DCT paper reports (Tang et al., ACM MM 2024), as data, each table with what is doubtful about it.

They are there to be shown beside own results, and never instead of them. Accuracies are in per cent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from ...errors import ConfigError, nearest


@dataclass(frozen=True)
class Reported:
    """A table of the paper. Where severity or setting is None, the columns are the severities or settings."""

    key: str
    caption: str
    label: str  # in the paper's LaTeX source
    data: str
    severity: int | None
    setting: str | None
    model: str | None  # timm's name, with the tag of the weights; None where it is not stated
    unit: str
    printed: bool  # False: the paper's source has the table, but commented out
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]  # by method, a value for each column
    averages: Mapping[str, float]  # by method, as printed; empty where the table has no such column
    deviations: Mapping[str, tuple[float, ...]]  # over three seeds, for those methods that have them
    average_deviations: Mapping[str, float]
    commented_out: Mapping[str, tuple[float, ...]]  # rows that were not printed, the average last if there is one
    doubts: tuple[str, ...]

    def row(self, method: str) -> dict[str, float]:
        """A method's values by column."""
        return dict(zip(self.columns, self.rows[_known(method, self.rows, f"row of the table {self.key!r}")]))

    def only(self, column: str) -> Reported:
        """This table with one column, which is then the average too."""
        at = self.columns.index(_known(column, self.columns, f"column of the table {self.key!r}"))

        def pick(rows: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
            return {method: values[at] for method, values in rows.items()}

        def as_rows(values: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
            return {method: (value,) for method, value in values.items()}

        values, deviations = pick(self.rows), pick(self.deviations)
        return replace(
            self,
            columns=(column,),
            rows=as_rows(values),
            averages=values,
            deviations=as_rows(deviations),
            average_deviations=deviations,
            commented_out=as_rows(pick(self.commented_out)),
        )


@dataclass(frozen=True)
class Figure:
    """A figure of the paper. None has its numbers printed."""

    key: str
    label: str
    printed: bool
    shows: str


@dataclass(frozen=True)
class Claim:
    """A number in the paper's text."""

    table: str | None  # key of the table that it is about
    says: str
    value: float
    unit: str
    doubt: str | None


def tables() -> dict[str, Reported]:
    """All tables by key."""
    return {key: _table(key, values) for key, values in _paper()["tables"].items()}


def reported(key: str) -> Reported:
    """One table."""
    if key in figures():
        raise ConfigError(f"{key!r} is a figure of the paper, and its numbers are not printed: {figures()[key].shows}")
    return tables()[_known(key, tables(), "table of the paper")]


def figures() -> dict[str, Figure]:
    """What the paper shows in figures."""
    return {key: Figure(key=key, **values) for key, values in _paper()["figures"].items()}


def claims() -> list[Claim]:
    """The numbers in the paper's text."""
    return [Claim(**values) for values in _paper()["claims"]]


def counterpart(*, data: str, severity: int | None, setting: str, model: str) -> Reported | None:
    """The reported table that corresponds to a run, or None if the paper has none.

    Args:
        data: "imagenet-c", "imagenet-r", "visda-2021" or "office-home".
        severity: Of the corruptions; None where there are none.
        setting: As in `acclimate.data.streams.SETTINGS`.
        model: timm's name with the tag of the weights: other weights have other numbers.
    """
    for table in tables().values():
        if (table.data, table.model) != (data, model) or not table.columns:
            continue
        if (table.severity, table.setting) == (severity, setting):
            return table
        if (table.severity, table.setting) == (severity, None) and setting in table.columns:
            return replace(table.only(setting), setting=setting)
        if (table.severity, table.setting) == (None, setting) and str(severity) in table.columns:
            return replace(table.only(str(severity)), severity=severity)
    return None


@cache
def _paper() -> dict[str, Any]:
    return json.loads(files(__package__).joinpath("reported.json").read_text(encoding="utf-8"))


def _table(key: str, values: Mapping[str, Any]) -> Reported:
    lists = {name: tuple(values[name]) for name in ("columns", "doubts")}
    rows = {name: {m: tuple(row) for m, row in values[name].items()} for name in ("rows", "deviations", "commented_out")}
    means = {name: dict(values[name]) for name in ("averages", "average_deviations")}
    return Reported(key=key, **{**values, **lists, **rows, **means})


def _known(name: str, known: Mapping[str, Any] | tuple[str, ...], what: str) -> str:
    if name not in known:
        raise ConfigError(f"There is no {what} {name!r}.{nearest(name, known, 0.4)} There are: {', '.join(known)}.")
    return name
