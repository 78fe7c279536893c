"""Results as a table of methods and domains, with confidence intervals of the differences."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from ..data.domains import CLEAN, DomainKey
from ..errors import ConfigError, shorten_list
from .paired import Counts, Difference, paired_difference, unpack_counts
from .spec import Spec
from .store import Outcome

SOURCE = "source"  # the baseline of all comparisons


class RowKey(NamedTuple):
    """The key of a row of a table: a method with everything that determines its behaviour."""

    method: str
    options: tuple[tuple[str, str], ...]  # names and values, sorted by name

    @classmethod
    def of(cls, spec: Spec) -> RowKey:
        """Return the key of the row to which a run belongs."""
        return cls(spec.method, tuple(sorted((name, str(value)) for name, value in spec.config.items())))

    @property
    def is_source(self) -> bool:
        """Whether the row is that of the unadapted model. With recentring, the method `source` adapts."""
        return self.method == SOURCE and "recentre" not in dict(self.options)


class Summary(Enum):
    """Names a column that is not a domain."""

    MEAN = "mean"  # over the shifts, with equal weights
    SECOND_HALF = "second half"  # the mean over the shifts of the second half of each


Column = DomainKey | Summary


@dataclass(frozen=True)
class Cell:
    """An accuracy in per cent, as the mean over seeds."""

    accuracy: float
    deviation: float | None  # standard deviation over seeds; None for a single seed
    seeds: int

    def __str__(self) -> str:
        return f"{self.accuracy:.1f}" + ("" if self.deviation is None else f"±{self.deviation:.1f}")


class Grid:
    """A table of accuracies by method and domain, in per cent, as means over seeds.

    The columns are the domains, the mean over them, and the mean over the second half of each. Clean images are a column of
    their own, and in no mean, unless there is nothing else.

    Args:
        outcomes: Runs that differ only in method, domain and seed.
        mix: Whether to accept runs with different protocols. `differences` lists the differences.
    """

    def __init__(self, outcomes: Sequence[Outcome], *, mix: bool = False) -> None:
        if not outcomes:
            raise ConfigError("There is no result to tabulate.")
        self.differences = differences(outcomes)
        if self.differences and not mix:
            raise ConfigError(
                "These results were made under different protocols and do not belong in one table:\n"
                + "\n".join(self.differences)
                + "\nChoose those of one protocol, or say that they may be mixed (mix=True; on the command line --mix)."
            )
        self.outcomes = list(outcomes)
        self.runs: dict[RowKey, list[Outcome]] = {}
        for outcome in outcomes:
            self.runs.setdefault(RowKey.of(outcome.spec), []).append(outcome)
        self.rows = list(self.runs)
        self.source = next((row for row in self.rows if row.is_source), None)
        self.domains = list(dict.fromkeys(key for o in outcomes for key in o.spec.domains))
        self.shifts = [key for key in self.domains if key.name != CLEAN] or self.domains  # the domains of the means
        self.columns: list[Column] = [*self.domains, *Summary]
        self._headings = _headings(self.domains)
        self._labels = row_labels(outcomes)
        self._cells = {(row, column): self._cell(row, column) for row in self.rows for column in self.columns}
        self._leaders: dict[Column, list[RowKey]] = {}

    # ---- names of rows and columns -----------------------------------------------------------------------------

    def label(self, row: RowKey) -> str:
        """Return the name of a row: the method, with its options if the table has several rows of the method."""
        return self._labels[row]

    def heading(self, column: Column) -> str:
        """Return the name of a column, with the severity only if it distinguishes domains.

        No two columns have the same name: the name of a domain that is called "mean", or "fog/5", is in quotes.
        """
        return self._headings[column]

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.outcomes[0].spec.model["name"]

    @property
    def severities(self) -> list[int]:
        """The severities of the corruptions, or an empty list if there is no corruption."""
        return sorted({key.severity for key in self.domains if key.severity is not None})

    @property
    def scope(self) -> str:
        """The data, the severity and the setting, in words."""
        spec, levels = self.outcomes[0].spec, self.severities
        which = f"severities {levels[0]} to {levels[-1]}" if len(levels) > 1 else f"severity {levels[0]}" if levels else ""
        return ", ".join(filter(None, (spec.dataset, which, spec.setting)))

    # ---- numbers ---------------------------------------------------------------------------------------------------

    def _cell(self, row: RowKey, column: Column) -> Cell | None:
        by_seed: dict[int, list[float]] = {}
        for outcome in self.runs[row]:
            value = _value(outcome, column, self.shifts)
            if value is not None:
                by_seed.setdefault(outcome.spec.seed, []).append(100 * value)
        values = [statistics.fmean(each) for each in by_seed.values()]
        if not values:
            return None
        return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def cell(self, row: RowKey, column: Column) -> Cell | None:
        """Return a cell of the table, or None if there is no run."""
        return self._cells[row, column]

    def text(self, row: RowKey, column: Column) -> str:
        """Return a cell as text."""
        return str(self.cell(row, column) or "-")

    def complete(self, row: RowKey) -> bool:
        """Return whether a row has every domain of the means.

        The mean of an incomplete row is over other domains, and is not compared.
        """
        return all(self.cell(row, key) for key in self.shifts)

    def compared(self, column: Column) -> list[RowKey]:
        """Return the rows whose cells in a column can be compared, in descending order."""
        cells = {row: cell for row in self.rows if (cell := self.cell(row, column))}
        fit = [row for row in cells if not isinstance(column, Summary) or self.complete(row)]
        return sorted(fit, key=lambda row: -cells[row].accuracy)

    def gain(self, row: RowKey, column: Column) -> Difference | None:
        """Return the difference of a cell from that of the source model.

        It is None for the source model itself, and if the two cells cannot be compared.
        """
        compared = self.compared(column)
        if row == self.source or self.source not in compared or row not in compared:
            return None
        return self.difference(row, self.source, column)

    def difference(self, row: RowKey, other: RowKey, column: Column) -> Difference:
        """Return the difference between two rows, with its interval if their images can be paired."""
        keys = self.shifts if isinstance(column, Summary) else [column]
        mine, theirs = self._images[row], self._images[other]
        shared = [key for key in mine if key in theirs and key[0] in keys]
        same_images = all(mine[key][0] == theirs[key][0] for key in shared)
        if same_images and {key for key, _ in shared} == {*keys}:
            halves = slice(1, 2) if column is Summary.SECOND_HALF else slice(2)
            return paired_difference([(mine[key][1][halves], theirs[key][1][halves]) for key in shared])
        first, second = self.cell(row, column), self.cell(other, column)
        assert first is not None and second is not None
        return Difference(first.accuracy - second.accuracy)

    @cached_property
    def _images(self) -> dict[RowKey, dict[tuple[DomainKey, int], tuple[str, Counts]]]:
        """Return the digest of the images and the counts of correct predictions, by row, domain and seed."""
        return {
            row: {
                (key, o.spec.seed): (data, unpack_counts(o.result.by_image[key]))
                for o in runs
                for key, data in zip(o.spec.domains, o.spec.data)
                if key in o.result.by_image
            }
            for row, runs in self.runs.items()
        }

    def leaders(self, column: Column) -> list[RowKey]:
        """Return the row with the highest cell, and the rows whose difference from it is within chance.

        The list is empty if no interval is known.
        """
        if column not in self._leaders:
            first, others = self.compared(column)[:1], self.compared(column)[1:]
            apart = {row: self.difference(first[0], row, column) for row in others}
            known = all(difference.interval is not None for difference in apart.values())
            near = [row for row, difference in apart.items() if not difference.beyond_chance]
            self._leaders[column] = first + near if known else []
        return self._leaders[column]

    def best(self, row: RowKey, column: Column) -> bool:
        """Return whether a cell is marked as one of the best.

        It is if it is one of the leaders, and not all cells are.
        """
        leaders = self.leaders(column)
        return row in leaders and len(leaders) < len(self.compared(column))


def _value(outcome: Outcome, column: Column, shifts: Sequence[DomainKey]) -> float | None:
    """Return the accuracy of a run in a column, whose means are over `shifts`, or None if the run has none of them."""
    result = outcome.result
    if not isinstance(column, Summary):
        return result.per_domain.get(column)
    mine = [key for key in result.per_domain if key in shifts]
    if not mine or len(mine) == len(result.per_domain):
        return None if not mine else result.mean if column is Summary.MEAN else result.second_half
    if column is Summary.MEAN:
        return statistics.fmean(result.per_domain[key] for key in mine)
    halves = [unpack_counts(result.by_image[key])[1].sum(-1, dtype=int) for key in mine]
    return statistics.fmean(float(right / met) for met, right in halves)


def _headings(domains: Sequence[DomainKey]) -> dict[Column, str]:
    """Return the names of the columns of a table."""
    several = Counter(key.name for key in domains)
    names: dict[Column, str] = {column: column.value for column in Summary}
    names |= {key: str(key) if several[key.name] > 1 else key.name for key in domains}
    count = Counter(names.values())
    ambiguous = [key for key in domains if count[names[key]] > 1]
    return names | {key: str(DomainKey(repr(key.name), key.severity)) for key in ambiguous}


def row_labels(outcomes: Sequence[Outcome]) -> dict[RowKey, str]:
    """Return the names of rows.

    The name is that of the method. If a method has several rows, the options that distinguish them are added.
    """
    changed: dict[RowKey, Mapping[str, object]] = {RowKey.of(o.spec): o.spec.changed for o in outcomes}
    labels = {}
    for row in changed:
        alike = [other for other in changed if other.method == row.method]
        differing = [(n, v) for n, v in row.options if any(dict(other.options).get(n) != v for other in alike)]
        # Defaults are not shown. A value that differs although no run changed it is not an option, but a digest of a file.
        shown = [f"{n}={v}" for n, v in differing if n in changed[row] or not any(n in changed[o] for o in alike)]
        labels[row] = row.method + (f"({', '.join(shown)})" if shown else "")
    return labels


def differences(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each difference between the protocols of runs, and an empty list if there is none."""
    found = []
    lines: dict[str, dict[str, list[str]]] = {}
    for spec in (outcome.spec for outcome in outcomes):
        for line, value in _compared_lines(spec):
            lines.setdefault(line, {}).setdefault(value, []).append(_what(spec))
    for line, methods in lines.items():
        if len(methods) > 1:
            found.append(f"{line}: " + "; ".join(f"{value} ({shorten_list(which)})" for value, which in methods.items()))
    met: dict[tuple[tuple[DomainKey, ...], int], dict[tuple[str, ...], list[str]]] = {}
    runs: Counter[tuple[str, tuple[DomainKey, ...], int]] = Counter()
    labels = row_labels(outcomes)
    for spec in (outcome.spec for outcome in outcomes):
        where = tuple(spec.domains)
        met.setdefault((where, spec.seed), {}).setdefault((spec.order, *spec.data), []).append(spec.method)
        runs[labels[RowKey.of(spec)], where, spec.seed] += 1
    for (where, seed), each in met.items():
        if len(each) > 1:
            who = " and ".join(shorten_list(methods) for methods in each.values())
            on = ", ".join(map(str, where))
            found.append(f"images or their order: {who} did not meet the same on {on}, seed {seed}")
    for (method, where, seed), count in runs.items():
        if count > 1:
            on = ", ".join(map(str, where))
            found.append(f"runs: {count} results are of {method} on {on} with seed {seed}")
    return found


def _compared_lines(spec: Spec) -> Iterator[tuple[str, str]]:
    """Yield what runs of one table have in common, where it applies: clean images have no corruption to be made alike."""
    yield from ((name, value) for name, value in spec.shared.items() if name != "preprocessing")
    yield from ((f"preprocessing, {name}", str(value)) for how in spec.preprocessing for name, value in how.items())


def _what(spec: Spec) -> str:
    return f"{spec.method} on {spec.domains[0]}" + (" ..." if len(spec.domains) > 1 else "")
