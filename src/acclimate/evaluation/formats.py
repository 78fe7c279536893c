"""Tables as text: for a terminal, Markdown, CSV, LaTeX and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from rich.table import Table
from rich.text import Text

from ..core.console import PlainConsole
from .published import PublishedTable
from .store import Outcome
from .tables import Column, Grid, RowKey, Summary

FORMATS = ("terminal", "markdown", "csv", "latex", "json")
SHORT = {
    "gaussian_noise": "gauss", "shot_noise": "shot", "impulse_noise": "impul", "speckle_noise": "speck",
    "defocus_blur": "defoc", "glass_blur": "glass", "motion_blur": "motion", "zoom_blur": "zoom", "gaussian_blur": "gblur",
    "brightness": "brit", "contrast": "contr", "elastic_transform": "elast", "pixelate": "pixel", "jpeg_compression": "jpeg",
}  # fmt: skip
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
WIDTH = 120  # in characters, if there is no terminal
DECIMALS = 4  # in CSV and JSON
INTERVAL = "95 % interval over images, paired by image; it does not cover other orders of the stream"


def write_table(form: str, grid: Grid, title: str, paper: PublishedTable | None = None) -> str:
    """Return a table as text.

    Args:
        form: One of `FORMATS`.
        grid: The table.
        title: The title of a table for a terminal or LaTeX.
        paper: A published table that was fitted to the grid, whose rows are added beside ours.
    """
    if form == "terminal":
        console = PlainConsole(file=io.StringIO(), width=WIDTH, force_jupyter=False)  # a notebook would display it
        console.print(terminal(grid, title, width=WIDTH))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()
    if form == "latex":
        return latex(grid, title, paper)
    return {"markdown": markdown, "csv": comma_separated, "json": as_json}[form](grid, paper)


def legend(grid: Grid) -> str:
    """Return sentences that explain the numbers and marks of a table."""
    cells = [cell for row in grid.rows for column in grid.columns if (cell := grid.cell(row, column))]
    deviation = " ± standard deviation over seeds" if any(cell.deviation is not None for cell in cells) else ""
    if len(grid.rows) == 1:
        return f"Accuracy{deviation}." if deviation else ""
    gains = f"; below it, points above source ± {INTERVAL}" if grid.source else ""
    marks = "Bold: the highest of a domain or mean, and all that are within chance of it, unless that is every one."
    clean = " Means are without clean images." if len(grid.shifts) < len(grid.domains) else ""
    known = any(o.result.estimated_accuracy is not None for o in grid.outcomes)
    estimated = " Estimated: what the guard takes the mean to be, without labels." if known else ""
    return f"Accuracy{deviation}{gains}. {marks}{clean}{estimated}"


def terminal(grid: Grid, title: str, *, width: int = 80) -> Table:
    """Return a table of methods and domains in per cent, for a terminal.

    Numbers that are above the source model beyond chance are green, and those below are red.

    Args:
        grid: The table.
        title: The title above the table.
        width: The width of the terminal. If the domains do not fit side by side, they become rows. Names are broken into
            lines where that helps.
    """
    body = [[_coloured(grid, row, column) for column in grid.columns] for row in grid.rows]
    more = [(_estimated(grid, row), *cost(grid.runs[row])) for row in grid.rows]
    body = [[*cells, *(Text(word, "dim") for word in words)] for cells, words in zip(body, more)]
    columns, labels = (
        [*map(grid.heading, grid.columns), "estimated", "learned", "ms/image"],
        [grid.label(row) for row in grid.rows],
    )
    across = [[*map(Text, ("method", *columns))], *([Text(label), *cells] for label, cells in zip(labels, body))]
    down = [[*map(Text, ("", *labels))], *([Text(name), *each] for name, *each in zip(columns, *body))]
    layouts = [across, _broken(across), down, _broken(down)]
    heads, *rows = next((lines for lines in layouts if _width(lines) <= width), min(layouts, key=_width))
    table = _new_table(title, legend(grid))
    _fill(table, heads, rows)
    return table


def _new_table(title: str, caption: str) -> Table:
    """Return an empty table. Brackets in the names of methods and models are text, and not markup of rich."""
    return Table(
        title=Text(title, "table.title"),
        caption=Text(caption, "table.caption"),
        header_style="bold",
        title_justify="left",
        caption_justify="left",
    )


def _width(lines: Sequence[Sequence[Text]]) -> int:
    """Return the width of a table with these lines."""
    return sum(3 + max(len(part) for cell in column for part in cell.plain.split("\n")) for column in zip(*lines)) + 1


def _broken(lines: Sequence[Sequence[Text]]) -> list[list[Text]]:
    """Return a table whose names are in several lines, for example `dct(recentre=order)` and `elastic_transform` in two."""

    def broken(name: Text) -> Text:
        return Text(name.plain.replace("(", "\n(").replace(" ", "\n").replace("_", "_\n"))

    heads, *rows = lines
    return [[*map(broken, heads)], *([broken(row[0]), *row[1:]] for row in rows)]


def _short(grid: Grid, column: Column) -> str:
    """Return the name of a column, abbreviated so that fifteen columns fit."""
    return SHORT.get(grid.heading(column), grid.heading(column))


def cost(runs: Sequence[Outcome]) -> tuple[str, str]:
    """Return the share of images that a method learned from, and the milliseconds per image, as text."""
    samples = sum(o.result.samples for o in runs)
    used, seconds = sum(o.result.used for o in runs), sum(o.result.seconds for o in runs)
    return f"{used / samples:.0%}", f"{1000 * seconds / samples:.2f}"


def _estimated(grid: Grid, row: RowKey) -> str:
    """Return the accuracy that the guard has estimated without labels, in per cent, for the domains of the mean."""
    runs = [o.result for o in grid.runs[row] if set(o.spec.domains) <= set(grid.shifts)]
    found = [result.estimated_accuracy for result in runs if result.estimated_accuracy is not None]
    return f"{100 * sum(found) / len(found):.1f}" if found else "-"


def _coloured(grid: Grid, row: RowKey, column: Column) -> Text:
    gain = grid.gain(row, column)
    colour = ("green" if gain.points > 0 else "red") if gain and gain.beyond_chance else "default"
    text = Text(grid.text(row, column), style=f"bold {colour}" if grid.best(row, column) else colour)
    return text if gain is None else Text.assemble(text, "\n", (str(gain), "dim"))


def _fill(table: Table, heads: Sequence[Text], rows: Sequence[Sequence[Text]]) -> None:
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)


def markdown(grid: Grid, paper: PublishedTable | None = None) -> str:
    """Return a Markdown table, with the gain of the mean over the source model.

    Published rows, if given, are in italics.
    """
    gains = {row: gain for row in grid.rows if (gain := grid.gain(row, Summary.MEAN))}
    last = ["over source"] if gains else []
    heads = ["method", *(_in_markdown(_short(grid, column)) for column in grid.columns), *last]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in grid.rows:
        cells = [f"**{grid.text(row, c)}**" if grid.best(row, c) else grid.text(row, c) for c in grid.columns]
        lines.append(
            "| " + " | ".join([_in_markdown(grid.label(row)), *cells, *(str(gains.get(row, "-")) for _ in last)]) + " |"
        )
    for method, published in (paper.beside(grid) if paper else {}).items():
        values = [published.accuracy.get(column) for column in grid.columns]
        cells = ["-" if value is None else f"*{value:.1f}*" for value in values]
        lines.append("| " + " | ".join([f"*{method}, paper*", *cells, *("-" for _ in last)]) + " |")
    return "\n".join(lines)


def _in_markdown(name: str) -> str:
    """Return a name as text of Markdown, in which bars separate columns and angle brackets are HTML."""
    return " ".join(escape(name, quote=False).replace("|", "\\|").split())


def numbers(grid: Grid, row: RowKey, column: Column) -> dict[str, float | int | None] | None:
    """Return all numbers of a cell, rounded, or None if there is no run."""
    cell, gain = grid.cell(row, column), grid.gain(row, column)
    if cell is None:
        return None
    found = {**asdict(cell), "over_source": gain and gain.points, "interval": gain and gain.interval}
    return {name: round(value, DECIMALS) if isinstance(value, float) else value for name, value in found.items()}


def comma_separated(grid: Grid, paper: PublishedTable | None = None) -> str:
    """Return CSV with a line for each row and column, for a spreadsheet or a data frame."""
    text = io.StringIO()
    names = ["origin", "method", "column", "accuracy", "deviation", "seeds", "over_source", "interval"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in grid.rows:
        for column in grid.columns:
            found = numbers(grid, row, column)
            if found is not None:
                writer.writerow({"origin": "measured", "method": grid.label(row), "column": grid.heading(column), **found})
    for method, published in (paper.beside(grid) if paper else {}).items():
        for column, value in published.accuracy.items():
            found = {"accuracy": value, "deviation": published.deviation.get(column)}
            writer.writerow({"origin": "paper", "method": method, "column": grid.heading(column), **found})
    return text.getvalue()


def as_json(grid: Grid, paper: PublishedTable | None = None) -> str:
    """Return the table, its runs and their protocol as JSON."""
    rows = {
        grid.label(row): {
            "method": row.method,
            "options": dict(row.options),
            "cells": {grid.heading(column): numbers(grid, row, column) for column in grid.columns},
        }
        for row in grid.rows
    }
    published = paper.beside(grid) if paper else {}
    content = {
        "protocol": grid.outcomes[0].spec.shared,
        "differences": grid.differences,
        "interval": INTERVAL,
        "columns": [grid.heading(column) for column in grid.columns],
        "rows": rows,
        "paper": {m: {grid.heading(c): value for c, value in row.accuracy.items()} for m, row in published.items()},
        "mismatches": paper.mismatches(grid) if paper else [],
        "doubts": list(paper.doubts) if paper else [],
        "runs": [
            {"id": o.spec.id, "method": o.spec.method, "config": o.spec.config, "domains": o.spec.domains,
             "seed": o.spec.seed, "order": o.spec.order, "digest": o.result.digest, "samples": o.result.samples}
            for o in grid.outcomes
        ],
    }  # fmt: skip
    return json.dumps(content, indent=1)


def latex(grid: Grid, caption: str, paper: PublishedTable | None = None) -> str:
    """Return a LaTeX table in the layout of the papers (booktabs).

    The columns are the domains and then the mean. The best numbers are bold, and standard deviations are below their row.
    """
    columns: list[Column] = [*grid.domains, Summary.MEAN]
    heads = [_short(grid, key) for key in grid.domains]
    lines = [
        r"\begin{table*}[t]",
        r"\centering",
        rf"\caption{{{_escaped(caption)}}}",
        r"\resizebox{\linewidth}{!}{",
        rf"\begin{{tabular}}{{l|{'c' * len(grid.domains)}|c}}",
        r"\toprule",
        " & ".join(["Method", *map(_escaped, heads), "Avg."]) + r" \\",
        r"\midrule",
    ]
    for method, published in (paper.beside(grid) if paper else {}).items():
        values = [published.accuracy.get(column) for column in columns]
        texts = ["--" if value is None else f"{value:.1f}" for value in values]
        lines.append(" & ".join([rf"\textit{{{_escaped(method)} (paper)}}", *texts]) + r" \\")
    if paper:
        lines.append(r"\midrule")
    for row in grid.rows:
        cells = {column: grid.cell(row, column) for column in columns}
        texts = ["--" if cell is None else f"{cell.accuracy:.1f}" for cell in cells.values()]
        texts = [rf"\textbf{{{text}}}" if grid.best(row, column) else text for column, text in zip(columns, texts)]
        lines.append(" & ".join([_escaped(grid.label(row)), *texts]) + r" \\")
        spread = ["" if cell is None or cell.deviation is None else rf"$\pm{cell.deviation:.1f}$" for cell in cells.values()]
        if any(spread):
            lines.append(" & ".join(["", *spread]) + r" \\")
    card = "; ".join(f"{name}: {value}" for name, value in grid.outcomes[0].spec.shared.items())
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table*}", f"% {' '.join(card.split())}"])


def _escaped(text: str) -> str:
    """Return text for LaTeX, in one line."""
    return " ".join("".join(LATEX.get(c, "\\" + c if c in "_%&#${}" else c) for c in text).split())


def beside(grid: Grid, paper: PublishedTable) -> Table:
    """Return a table of our numbers, the published ones, and their differences, for every method that has both."""
    severity = paper.severity and f"severity {paper.severity}"
    there = [word for word in (paper.data, severity, paper.setting, paper.model) if word]
    table = _new_table(f"Beside the paper: {', '.join(there)}", f"Ours: {grid.scope}, {grid.model}")
    published, rows = paper.beside(grid), []
    for row in (row for row in grid.rows if grid.label(row) in published):
        for column, theirs in published[grid.label(row)].accuracy.items():
            cell = grid.cell(row, column)
            if cell is not None:
                apart = f"{cell.accuracy - theirs:+.1f}"
                words = (grid.label(row), grid.heading(column), f"{cell.accuracy:.1f}", f"{theirs:.1f}", apart)
                rows.append([Text(word) for word in words])
    _fill(table, [Text(name) for name in ("method", "column", "ours", "paper", "apart")], rows)
    return table
