"""Results as tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from ..errors import ConfigError
from .run import Result
from .sweep import Outcome

SHORT = {
    "gaussian_noise": "gauss", "shot_noise": "shot", "impulse_noise": "impul", "speckle_noise": "speck",
    "defocus_blur": "defoc", "glass_blur": "glass", "motion_blur": "motion", "zoom_blur": "zoom", "gaussian_blur": "gblur",
    "brightness": "brit", "contrast": "contr", "elastic_transform": "elast", "pixelate": "pixel", "jpeg_compression": "jpeg",
}  # fmt: skip
WIDEST = 6  # corruptions side by side in a terminal; more are listed below each other
COLUMNS: dict[str, Callable[[Result], float]] = {"mean": lambda result: result.mean, "2nd half": lambda result: result.late}


class Grid:
    """Accuracy by method and column, in per cent, over seeds.

    The columns are the domains, then the mean over them, and the mean over the second half of each.

    Args:
        outcomes: Runs that differ in method, domain and seed, and in nothing else.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        _require_comparable(outcomes)
        self.methods = list(dict.fromkeys(o.spec.method for o in outcomes))
        titles = list(dict.fromkeys(t for o in outcomes for t in o.spec.domains))
        names = [title.split("/")[0] for title in titles]
        self._names = names if len(set(names)) == len(names) else titles  # the severity only where it distinguishes
        self._values: dict[tuple[str, str], dict[int, list[float]]] = {}
        for outcome in outcomes:
            spec, result = outcome.spec, outcome.result
            for title, accuracy in result.per_domain.items():
                self._note(spec.method, self._names[titles.index(title)], spec.seed, accuracy)
            for column, score in COLUMNS.items():
                self._note(spec.method, column, spec.seed, score(result))
        self.columns = [*self._names, *COLUMNS]

    def _note(self, method: str, column: str, seed: int, value: float) -> None:
        self._values.setdefault((method, column), {}).setdefault(seed, []).append(100 * value)

    def cell(self, method: str, column: str) -> tuple[float, float | None] | None:
        """Mean over seeds, and the standard deviation if there are several; None where there is no run."""
        by_seed = self._values.get((method, column))
        if by_seed is None:
            return None
        values = [statistics.fmean(scores) for scores in by_seed.values()]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None

    def text(self, method: str, column: str) -> str:
        cell = self.cell(method, column)
        if cell is None:
            return "-"
        return f"{cell[0]:.1f}" + (f"±{cell[1]:.1f}" if cell[1] is not None else "")

    def best(self, method: str, column: str) -> bool:
        """Whether no other method's cell, as it is printed, is higher."""
        cells = {m: self.cell(m, column) for m in self.methods}
        shown = {m: round(cell[0], 1) for m, cell in cells.items() if cell is not None}
        return method in shown and shown[method] == max(shown.values())

    def gain(self, method: str, column: str) -> float:
        """Points above the source model, 0 where that is not known."""
        mine, source = self.cell(method, column), self.cell("source", column)
        return mine[0] - source[0] if mine and source else 0.0


def terminal(outcomes: Sequence[Outcome], title: str) -> Table:
    """Methods by corruptions in per cent: green above the source model, red below it, the best in bold."""
    grid = Grid(outcomes)
    table = Table(title=title, header_style="bold", title_justify="left")
    rows: dict[str, list[Text]] = {}  # each method's cells, then what it cost
    for method in grid.methods:
        mine = [o.result for o in outcomes if o.spec.method == method]
        samples = sum(r.samples for r in mine)
        used = f"{sum(r.used for r in mine) / samples:.0%}"
        speed = f"{1000 * sum(r.seconds for r in mine) / samples:.2f}"
        rows[method] = [*(_cell(grid, method, c) for c in grid.columns), Text(used, "dim"), Text(speed, "dim")]
    names = [*(SHORT.get(c, c) for c in grid.columns), "learned from", "ms/image"]
    if len(grid.columns) - len(COLUMNS) <= WIDEST:
        _fill(table, "method", names, [[Text(method), *cells] for method, cells in rows.items()])
    else:
        names[: len(grid.columns)] = grid.columns
        _fill(table, "", list(rows), [[Text(name), *cells] for name, *cells in zip(names, *rows.values())])
    return table


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The same for a document."""
    grid = Grid(outcomes)
    lines = [
        "| method | " + " | ".join(SHORT.get(c, c) for c in grid.columns) + " |",
        "|---" * (len(grid.columns) + 1) + "|",
    ]
    for method in grid.methods:
        cells = [grid.text(method, c) for c in grid.columns]
        cells = [f"**{cell}**" if grid.best(method, c) else cell for c, cell in zip(grid.columns, cells)]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _fill(table: Table, corner: str, columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    table.add_column(corner, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)


def _cell(grid: Grid, method: str, column: str) -> Text:
    gain = grid.gain(method, column)
    colour = "green" if gain > 0.05 else "red" if gain < -0.05 else "default"
    return Text(grid.text(method, column), style=f"bold {colour}" if grid.best(method, column) else colour)


def _require_comparable(outcomes: Sequence[Outcome]) -> None:
    if not outcomes:
        raise ConfigError("There is no result to tabulate.")
    for what in ("model", "setting", "batch_size", "protocol", "versions"):
        found = list(dict.fromkeys(str(getattr(o.spec, what)) for o in outcomes))
        if len(found) > 1:
            raise ConfigError(f"These results differ in their {what} and do not belong in one table: {'; '.join(found)}.")
    runs = Counter((o.spec.method, tuple(o.spec.domains), o.spec.seed) for o in outcomes)
    (method, domains, seed), count = runs.most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"{count} results are of {method} on {', '.join(domains)} with seed {seed}, in different configurations or on "
            "different data: give those of one."
        )
