"""What several parts of the page need: its rows and columns, their ranks, and everybody's colour."""

from __future__ import annotations

from ..evaluation.store import Outcome
from ..evaluation.tables import Column, Grid, Summary

HUES = 7  # lines that can be told apart; the rows beyond the best so many are grey until they are picked


class Sheet:
    """Holds a grid as the page shows it. Rows are those of the grid, and drawings call them by their labels.

    Args:
        grid: The table.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.columns: list[Column] = [*Summary, *grid.domains]  # a narrow screen shows the first ones
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
        """Return what an outcome's stream is called."""
        first, *rest = [self.grid.heading(key) for key in outcome.spec.domains]
        return f"{first} to {rest[-1]}, {len(rest) + 1} domains in one stream ({outcome.spec.setting})" if rest else first


def total(runs: list[Outcome], what: str) -> float:
    """Return the sum of a number over the results of runs."""
    return sum(getattr(outcome.result, what) for outcome in runs)


def milliseconds(runs: list[Outcome]) -> float:
    """Return the time per image."""
    return 1000 * total(runs, "seconds") / total(runs, "samples")
