"""Results as tables."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.registry import find
from ..data.corruptions import CORRUPTIONS
from ..errors import ConfigError, some
from ..papers.dct.protocols import Fingerprint, looks_like
from ..papers.dct.reported import Reported
from .run import Result
from .store import Outcome

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
        mix: Take also runs whose protocols differ; `differences` says in what.
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
        self._labels = _labels(outcomes)
        self.methods = list(dict.fromkeys(map(self.label, outcomes)))
        titles = list(dict.fromkeys(t for o in outcomes for t in o.spec.domains))
        names = [title.split("/")[0] for title in titles]
        self.domains = names if len(set(names)) == len(names) else titles  # the severity only where it distinguishes
        self._values: dict[tuple[str, str], dict[int, list[float]]] = {}
        for outcome in outcomes:
            label, seed, result = self.label(outcome), outcome.spec.seed, outcome.result
            for title, accuracy in result.per_domain.items():
                self._note(label, self.domains[titles.index(title)], seed, accuracy)
            for column, score in COLUMNS.items():
                self._note(label, column, seed, score(result))
        self.columns = [*self.domains, *COLUMNS]

    def label(self, outcome: Outcome) -> str:
        """A row's name: the method's, with its options where it is there with several."""
        return self._labels[outcome.spec.id]

    @property
    def model(self) -> str:
        return self.outcomes[0].spec.model["name"]

    @property
    def severities(self) -> str:
        """In words, to be put before something else; empty where there are none."""
        found = sorted({title.partition("/")[2] for o in self.outcomes for title in o.spec.domains} - {""})
        return f"severity {' and '.join(found)}, " if len(found) in (1, 2) else "severities 1 to 5, " if found else ""

    def _note(self, method: str, column: str, seed: int, value: float) -> None:
        self._values.setdefault((method, column), {}).setdefault(seed, []).append(100 * value)

    def cell(self, method: str, column: str) -> tuple[float, float | None] | None:
        """Mean over seeds, and the standard deviation if there are several; None where there is no run."""
        by_seed = self._values.get((method, column))
        if by_seed is None:
            return None
        values = [statistics.fmean(scores) for scores in by_seed.values()]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None

    def seeds(self, method: str, column: str) -> int:
        """How many are behind a cell."""
        return len(self._values.get((method, column), {}))

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


def differences(outcomes: Sequence[Outcome]) -> list[str]:
    """In what the protocols of runs differ that are to be in one table, a line for each; none if they belong together."""
    found = []
    for line in outcomes[0].spec.shared:
        methods: dict[str, list[str]] = {}
        for outcome in outcomes:
            methods.setdefault(outcome.spec.shared[line], []).append(_what(outcome))
        if len(methods) > 1:
            found.append(f"{line}: " + "; ".join(f"{value} ({some(which)})" for value, which in methods.items()))
    met: dict[tuple[str, int], dict[str, list[str]]] = {}
    runs: Counter[tuple[str, str, int]] = Counter()
    labels = _labels(outcomes)
    for outcome in outcomes:
        spec = outcome.spec
        where = ", ".join(spec.domains)
        images = [{key: value for key, value in domain.items() if key != "generated"} for domain in spec.data]
        seen = json.dumps([spec.order, images], sort_keys=True)
        met.setdefault((where, spec.seed), {}).setdefault(seen, []).append(spec.method)
        runs[labels[spec.id], where, spec.seed] += 1
    for (where, seed), each in met.items():
        if len(each) > 1:
            who = " and ".join(some(methods) for methods in each.values())
            found.append(f"images or their order: {who} did not meet the same on {where}, seed {seed}")
    for (method, where, seed), count in runs.items():
        if count > 1:
            found.append(f"runs: {count} results are of {method} on {where} with seed {seed}")
    return found


def terminal(grid: Grid, title: str) -> Table:
    """Methods by corruptions in per cent: green above the source model, red below it, the best in bold."""
    table = Table(title=title, header_style="bold", title_justify="left")
    rows: dict[str, list[Text]] = {}  # each method's cells, then what it cost
    for method in grid.methods:
        mine = [o.result for o in grid.outcomes if grid.label(o) == method]
        samples = sum(r.samples for r in mine)
        used = f"{sum(r.used for r in mine) / samples:.0%}"
        speed = f"{1000 * sum(r.seconds for r in mine) / samples:.2f}"
        rows[method] = [*(_cell(grid, method, c) for c in grid.columns), Text(used, "dim"), Text(speed, "dim")]
    names = [*(SHORT.get(c, c) for c in grid.columns), "learned", "ms/image"]
    if len(grid.domains) <= WIDEST:
        _fill(table, "method", names, [[Text(method), *cells] for method, cells in rows.items()])
    else:
        names[: len(grid.columns)] = grid.columns
        _fill(table, "", list(rows), [[Text(name), *cells] for name, *cells in zip(names, *rows.values())])
    return table


def markdown(grid: Grid, paper: Reported | None = None) -> str:
    """For a document. The paper's rows, if given, are in italics."""
    lines = [
        "| method | " + " | ".join(SHORT.get(c, c) for c in grid.columns) + " |",
        "|---" * (len(grid.columns) + 1) + "|",
    ]
    for method in grid.methods:
        cells = [grid.text(method, c) for c in grid.columns]
        cells = [f"**{cell}**" if grid.best(method, c) else cell for c, cell in zip(grid.columns, cells)]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    for method, row in _paper_rows(grid, paper):
        lines.append(f"| *{method}, paper* | " + " | ".join("-" if v is None else f"*{v:.1f}*" for v in row) + " |")
    return "\n".join(lines)


def comma_separated(grid: Grid, paper: Reported | None = None) -> str:
    """One row for each method and column, with full precision: what a spreadsheet or a data frame takes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["source", "method", "column", "accuracy", "deviation", "seeds"])
    for method in grid.methods:
        for column in grid.columns:
            cell = grid.cell(method, column)
            if cell is not None:
                writer.writerow(["measured", method, column, cell[0], cell[1], grid.seeds(method, column)])
    for method, row in _paper_rows(grid, paper):
        writer.writerows(["paper", method, c, v, None, None] for c, v in zip(grid.columns, row) if v is not None)
    return text.getvalue()


def as_json(grid: Grid, paper: Reported | None = None) -> str:
    """Everything: the table, the runs behind it and their protocol."""
    rows = {
        method: {c: None if (cell := grid.cell(method, c)) is None else dict(zip(("accuracy", "deviation"), cell))
                 for c in grid.columns}
        for method in grid.methods
    }  # fmt: skip
    content = {
        "protocol": grid.outcomes[0].spec.shared,
        "differences": grid.differences,
        "columns": grid.columns,
        "rows": rows,
        "paper": {method: dict(zip(grid.columns, row)) for method, row in _paper_rows(grid, paper)},
        "doubts": list(paper.doubts) if paper else [],
        "runs": [
            {"id": o.spec.id, "method": o.spec.method, "config": o.spec.config, "domains": o.spec.domains,
             "seed": o.spec.seed, "order": o.spec.order, "digest": o.result.digest, "samples": o.result.samples}
            for o in grid.outcomes
        ],
    }  # fmt: skip
    return json.dumps(content, indent=1)


def latex(grid: Grid, caption: str, paper: Reported | None = None) -> str:
    """The paper's layout (booktabs): corruptions across, the mean last, the best in bold, deviations below their row."""
    columns = [*grid.domains, "mean"]
    several = any((cell := grid.cell(m, c)) and cell[1] is not None for m in grid.methods for c in columns)
    lines = [
        r"\begin{table*}[t]",
        r"\centering",
        rf"\caption{{{_escaped(caption)}}}",
        r"\resizebox{\linewidth}{!}{",
        rf"\begin{{tabular}}{{l|{'c' * len(grid.domains)}|c}}",
        r"\toprule",
        " & ".join(["Method", *(_escaped(SHORT.get(c, c)) for c in grid.domains), "Avg."]) + r" \\",
        r"\midrule",
    ]
    for method, row in _paper_rows(grid, paper):
        values = ["--" if v is None else f"{v:.1f}" for c, v in zip(grid.columns, row) if c in columns]
        lines.append(" & ".join([rf"\textit{{{_escaped(method)} (paper)}}", *values]) + r" \\")
    if paper:
        lines.append(r"\midrule")
    for method in grid.methods:
        cells = {c: grid.cell(method, c) for c in columns}
        values = ["--" if cell is None else f"{cell[0]:.1f}" for cell in cells.values()]
        values = [rf"\textbf{{{v}}}" if grid.best(method, c) else v for c, v in zip(columns, values)]
        lines.append(" & ".join([_escaped(method), *values]) + r" \\")
        if several:
            spread = ["" if cell is None or cell[1] is None else rf"$\pm{cell[1]:.1f}$" for cell in cells.values()]
            lines.append(" & ".join(["", *spread]) + r" \\")
    card = "; ".join(f"{name}: {value}" for name, value in grid.outcomes[0].spec.shared.items())
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table*}", f"% {card}"])


def beside(grid: Grid, paper: Reported) -> Table:
    """Ours and the paper's for every method that both have, and how far they are apart."""
    about = f"Beside the paper: {paper.data}, severity {paper.severity}, {paper.setting}, {paper.model}"
    ours = f"Ours: {grid.outcomes[0].spec.dataset}, {grid.severities}{grid.outcomes[0].spec.setting}, {grid.model}"
    table = Table(title=about, caption=ours, header_style="bold", title_justify="left", caption_justify="left")
    rows = []
    reported = dict(_paper_rows(grid, paper))
    for method in (m for m in grid.methods if m in reported):
        for column, theirs in zip(grid.columns, reported[method]):
            cell = grid.cell(method, column)
            if theirs is not None and cell is not None:
                rows.append(
                    [Text(t) for t in (method, column, f"{cell[0]:.1f}", f"{theirs:.1f}", f"{cell[0] - theirs:+.1f}")]
                )
    _fill(table, "method", ["column", "ours", "paper", "apart"], rows)
    return table


def written(kind: str, grid: Grid, title: str, paper: Reported | None = None) -> str:
    """A table as text: "terminal", "markdown", "csv", "latex", "json" or "html"."""
    if kind == "terminal":
        console = Console(file=io.StringIO(), width=120)
        console.print(terminal(grid, title))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()
    if kind == "html":
        from ..report.page import page

        return page(grid.outcomes, title=title, paper=paper, notes=grid.differences)
    if kind == "latex":
        return latex(grid, title, paper)
    return {"markdown": markdown, "csv": comma_separated, "json": as_json}[kind](grid, paper)


def fingerprint(grid: Grid) -> Fingerprint | None:
    """What protocol in print the Source row looks like; None without such a row."""
    cell = grid.cell("source", "mean")
    if cell is None:
        return None
    spec = next(o.spec for o in grid.outcomes if o.spec.method == "source")
    severities = {title.partition("/")[2] for o in grid.outcomes for title in o.spec.domains}
    severity = int(severities.pop()) if len(severities) == 1 and severities != {""} else None
    columns = {c: value[0] for c in grid.domains if (value := grid.cell("source", c)) is not None}
    counts = [domain.get("sampled", domain.get("count")) for domain in spec.data]
    return looks_like(cell[0], columns, data=spec.dataset, severity=severity, samples=counts[0])


def _paper_rows(grid: Grid, paper: Reported | None) -> list[tuple[str, list[float | None]]]:
    """The paper's numbers in this table's columns; its mean only if that is over the same columns."""
    if paper is None:
        return []
    whole = set(paper.columns or CORRUPTIONS) == set(grid.domains) or len(paper.columns) == len(grid.domains) == 1
    return [
        (method, [*(paper.row(method).get(c) for c in grid.domains), paper.averages.get(method) if whole else None, None])
        for method in paper.rows
    ]


def _escaped(text: str) -> str:
    return "".join("\\" + c if c in "_%&#$" else c for c in text)


def _labels(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Names of rows by run: the method's; where it is there with several options, those that differ from its defaults."""
    configs: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        if outcome.spec.config not in configs.setdefault(outcome.spec.method, []):
            configs[outcome.spec.method].append(outcome.spec.config)
    labels = {}
    for outcome in outcomes:
        spec, several = outcome.spec, configs[outcome.spec.method]
        differing = [key for key in spec.config if any(config.get(key) != spec.config[key] for config in several)]
        defaults = {name: p.default for name, p in find(spec.method).options().items()} if differing else {}
        shown = [f"{key}={spec.config[key]}" for key in differing if spec.config[key] != defaults.get(key)]
        labels[spec.id] = spec.method + (f"({', '.join(shown)})" if shown else "")
    return labels


def _what(outcome: Outcome) -> str:
    domains = outcome.spec.domains
    return f"{outcome.spec.method} on {domains[0]}" + (" ..." if len(domains) > 1 else "")


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
