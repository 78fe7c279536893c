"""The data that several sections of the page share: rows and columns, ranks, and the colour of each method."""

from __future__ import annotations

from ..evaluation.store import Outcome
from ..evaluation.tables import Column, Grid, Summary

HUES = 7  # number of distinct colours; all but the best methods are grey until they are selected


class Sheet:
    """A grid as the page shows it; its rows are those of the grid, and drawings use the labels of the rows.

    Args:
        grid: The table of results.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.columns: list[Column] = [*Summary, *grid.domains]  # a narrow screen shows only the first ones
        self.labels = {row: grid.label(row) for row in grid.rows}
        self.runs = {label: grid.runs[row] for row, label in self.labels.items()}
        self.seeds = len({outcome.spec.seed for outcome in grid.outcomes})
        compared = grid.compared(Summary.MEAN)
        ranked = [*compared, *(row for row in grid.rows if row not in compared)]
        self.ranked = [self.labels[row] for row in ranked]
        self.means = {self.labels[row]: cell.accuracy for row in compared if (cell := grid.cell(row, Summary.MEAN))}
        hues = iter([f"hue{number}" for number in range(HUES)])
        hue = {self.labels[row]: "source" if row == grid.source else next(hues, "rest") for row in ranked}
        self.number = {label: number for number, label in enumerate(self.labels.values())}
        self.marks = {label: {"class_": hue[label], "data_m": number} for label, number in self.number.items()}

    def stream(self, outcome: Outcome) -> str:
        """Return the name of the stream of an outcome."""
        first, *rest = [self.grid.heading(key) for key in outcome.spec.domains]
        return f"{first} to {rest[-1]}, {len(rest) + 1} domains in one stream ({outcome.spec.setting})" if rest else first


def total(runs: list[Outcome], what: str) -> float:
    """Return the sum of a quantity over the results of runs."""
    return sum(getattr(outcome.result, what) for outcome in runs)


def milliseconds(runs: list[Outcome]) -> float:
    """Return the time per image in milliseconds."""
    return 1000 * total(runs, "seconds") / total(runs, "samples")
