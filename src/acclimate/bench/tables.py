"""Results as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from .run import Result
from .sweep import Outcome

SHORT = {
    "gaussian_noise": "gauss", "shot_noise": "shot", "impulse_noise": "impul", "speckle_noise": "speck",
    "defocus_blur": "defoc", "glass_blur": "glass", "motion_blur": "motion", "zoom_blur": "zoom", "gaussian_blur": "gblur",
    "brightness": "brit", "contrast": "contr", "elastic_transform": "elast", "pixelate": "pixel", "jpeg_compression": "jpeg",
}  # fmt: skip


class Grid:
    """Results by method and column, over seeds.

    Args:
        outcomes: Of one setting.
        score: What to tabulate.
    """

    def __init__(self, outcomes: Sequence[Outcome], score: Callable[[Result], float] = lambda result: result.mean) -> None:
        self.methods = list(dict.fromkeys(o.spec.method for o in outcomes))
        self.columns = list(dict.fromkeys(_column(o) for o in outcomes))
        self._outcomes, self._score = outcomes, score

    def cell(self, method: str, column: str | None = None) -> tuple[float, float | None]:
        """Mean over seeds, and the standard deviation if there are several; without a column, the mean of all of them."""
        by_seed: dict[int, list[float]] = {}
        for outcome in self._outcomes:
            if outcome.spec.method == method and column in (None, _column(outcome)):
                by_seed.setdefault(outcome.spec.seed, []).append(self._score(outcome.result))
        values = [statistics.fmean(scores) for scores in by_seed.values()]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None

    def best(self, column: str | None = None) -> float:
        """The highest cell of a column, as it is printed."""
        return max(round(100 * self.cell(method, column)[0], 1) for method in self.methods)


def terminal(outcomes: Sequence[Outcome], title: str) -> Table:
    """Methods by columns in per cent: green above the source model, red below it, the best of a column in bold."""
    grid, late = Grid(outcomes), Grid(outcomes, lambda result: result.late)
    table = Table(title=title, header_style="bold", title_justify="left")
    table.add_column("method")
    for name in (*(_short(c) for c in grid.columns), "mean", "2nd half"):
        table.add_column(name, justify="right")
    for name in ("learned from", "ms/image"):
        table.add_column(name, justify="right", style="dim")
    for method in grid.methods:
        mine = [o.result for o in outcomes if o.spec.method == method]
        samples = sum(r.samples for r in mine)
        cells = [_cell(grid, method, column) for column in (*grid.columns, None)]
        cells.append(_cell(late, method, None))
        used = f"{sum(r.used for r in mine) / samples:.0%}"
        table.add_row(method, *cells, used, f"{1000 * sum(r.seconds for r in mine) / samples:.2f}")
    return table


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The same for a document."""
    grid, late = Grid(outcomes), Grid(outcomes, lambda result: result.late)
    lines = ["| method | " + " | ".join(_short(c) for c in grid.columns) + " | mean | 2nd half |"]
    lines.append("|---" * (len(grid.columns) + 3) + "|")
    for method in grid.methods:
        cells = [_plain(grid, method, column) for column in (*grid.columns, None)] + [_plain(late, method, None)]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _column(outcome: Outcome) -> str:
    domains = outcome.spec.domains
    return domains[0].split("/")[0] if len(domains) == 1 else outcome.spec.setting


def _short(column: str) -> str:
    return SHORT.get(column, column)


def _plain(grid: Grid, method: str, column: str | None) -> str:
    value, spread = grid.cell(method, column)
    text = f"{100 * value:.1f}" + (f" ± {100 * spread:.1f}" if spread is not None else "")
    return f"**{text}**" if round(100 * value, 1) == grid.best(column) else text


def _cell(grid: Grid, method: str, column: str | None) -> Text:
    value, spread = grid.cell(method, column)
    style = "bold" if round(100 * value, 1) == grid.best(column) else ""
    if "source" in grid.methods and method != "source":
        gain = value - grid.cell("source", column)[0]
        style += " green" if gain > 0.0005 else " red" if gain < -0.0005 else ""
    return Text(f"{100 * value:.1f}" + (f" ±{100 * spread:.1f}" if spread is not None else ""), style=style.strip())
