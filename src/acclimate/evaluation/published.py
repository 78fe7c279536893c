"""Published tables, which can be shown beside runs of the same data, severity and setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..data.corruptions import CORRUPTIONS
from ..errors import ConfigError, suggest
from .tables import Column, Grid, Summary


class PublishedRow(NamedTuple):
    """The published numbers of a method in the columns of a grid."""

    accuracy: dict[Column, float]
    deviation: dict[Column, float]


@dataclass(frozen=True)
class PublishedTable:
    """A published table. If severity or setting is None, the columns are severities or settings.

    Accuracies are in per cent. Methods have the names of rows in a grid: `dct(generator=False)`.
    """

    key: str
    caption: str
    label: str  # in the paper's LaTeX source
    data: str
    severity: int | None
    setting: str | None
    model: str | None  # its name in timm, with the tag of the weights; None if it is not stated
    unit: str
    printed: bool  # False: the table is commented out in the paper's source
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]  # by method: a value for each column
    averages: Mapping[str, float]  # by method, as printed; empty if the table has no such column
    deviations: Mapping[str, tuple[float, ...]]  # over three seeds, if they are given
    average_deviations: Mapping[str, float]
    commented_out: Mapping[str, tuple[float, ...]]  # rows that are not printed; the average comes last, if there is one
    doubts: tuple[str, ...]

    def row(self, method: str) -> dict[str, float]:
        """Return the values of a method, by column."""
        return dict(zip(self.columns, self.rows[require_known(method, self.rows, f"row of the table {self.key!r}")]))

    def only(self, column: str) -> PublishedTable:
        """Return this table with a single column, which is also the average."""
        at = self.columns.index(require_known(column, self.columns, f"column of the table {self.key!r}"))

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

    def fitted(self, grid: Grid, *, mix: bool = False) -> PublishedTable:
        """Return this table in a form that fits beside runs.

        If its columns are settings or severities, only the column of the runs is kept.

        Args:
            grid: The runs.
            mix: Whether to accept a table of other data, another severity or another setting. `mismatches` lists the
                differences.
        """
        if not self.unit.startswith("accuracy"):
            raise ConfigError(f"The published table {self.key!r} has {self.unit}, which cannot stand beside accuracies.")
        setting, severities = grid.outcomes[0].spec.setting, grid.severities
        table = self
        if self.setting is None and setting in self.columns:
            table = replace(self.only(setting), setting=setting)
        elif self.severity is None and len(severities) == 1 and str(severities[0]) in self.columns:
            table = replace(self.only(str(severities[0])), severity=severities[0])
        wrong = table.mismatches(grid)
        if wrong and not mix:
            raise ConfigError(
                f"The published table {self.key!r} does not belong beside these runs ({'; '.join(wrong)}). Choose another, "
                "or say that they may be mixed (mix=True; on the command line --mix)."
            )
        return table

    def mismatches(self, grid: Grid) -> list[str]:
        """Return the properties in which the runs differ from this table. The model may differ."""
        spec = grid.outcomes[0].spec
        here = {"data": spec.dataset, "severity": grid.severities, "setting": spec.setting}
        there = {"data": self.data, "severity": [self.severity] if self.severity else [], "setting": self.setting}

        def said(value: object) -> str:
            return " and ".join(map(str, value)) or "none" if isinstance(value, list) else str(value or "several")

        return [f"{what}: {said(there[what])} there, {said(here[what])} here" for what in here if here[what] != there[what]]

    def shared(self, grid: Grid) -> dict[Column, str]:
        """Return the columns of a grid that this table has, with the names of its columns.

        If the grid has several severities, only that of the table is used.
        """
        if len(self.columns) == 1:
            return {Summary.MEAN: self.columns[0]}
        levels = {self.severity} if len(grid.severities) > 1 else {None, *grid.severities}
        return {key: key.name for key in grid.domains if key.name in self.columns and key.severity in levels}

    def beside(self, grid: Grid) -> dict[str, PublishedRow]:
        """Return the published rows in the columns of a grid.

        The mean is included only if it is over the same domains.
        """
        shared = self.shared(grid)
        whole = {key.name for key in grid.shifts} == {*(self.columns or CORRUPTIONS)} and len(grid.severities) < 2

        def placed(values: Mapping[str, float], average: float | None) -> dict[Column, float]:
            found: dict[Column, float] = {ours: values[theirs] for ours, theirs in shared.items() if theirs in values}
            return {**found, Summary.MEAN: average} if whole and average is not None else found

        return {
            method: PublishedRow(
                placed(dict(zip(self.columns, values)), self.averages.get(method)),
                placed(dict(zip(self.columns, self.deviations.get(method, ()))), self.average_deviations.get(method)),
            )
            for method, values in self.rows.items()
        }


def require_known(name: str, known: Iterable[str], what: str) -> str:
    """Return a name if it is known, and otherwise raise an error that suggests a similar one."""
    names = list(known)
    if name not in names:
        raise ConfigError(f"There is no {what} {name!r}.{suggest(name, names, 0.4)} There are: {', '.join(names)}.")
    return name
