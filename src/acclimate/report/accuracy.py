"""The table of the page: accuracies, gains over the source model, and published rows beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from ..evaluation.formats import legend
from ..evaluation.paired import Difference
from ..evaluation.published import PublishedTable
from ..evaluation.tables import Column, Grid, RowKey, Summary
from .html import Html, breakable, items, join, scrolled_table, tag
from .sheet import Sheet

DASH, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
TINTS = "".join(f".tint{number} {{ --tint: {number / 100:g}; }}\n" for number in range(101))  # the classes of `_tint`


def accuracy_part(sheet: Sheet, paper: PublishedTable | None) -> Iterator[Html]:
    """Yield the table of accuracies and its explanations.

    Args:
        sheet: The results.
        paper: A published table that was fitted to the grid.
    """
    grid = sheet.grid
    about = "Top-1 accuracy in per cent. The mean counts every domain alike, and so does that over the second half of each "
    yield tag("p", f"{about}domain's images, when adaptation has had its time. {legend(grid)}")
    gains = [gain for row in grid.rows for column in sheet.columns if (gain := grid.gain(row, column))]
    limit = max((abs(gain.points) for gain in gains), default=0.0)
    yield _scale(gains, limit)
    reported = _published_rows(sheet, paper) if paper else {}
    rows = []
    for row, label in sheet.labels.items():
        cells = [_cell(grid, row, column, limit) for column in sheet.columns]
        partial = "" if grid.complete(row) else tag("sup", "†")
        rows.append(tag("tr", tag("th", label, partial, scope="row", title=label), *cells, data_m=sheet.number[label]))
        rows += [reported.pop(label)] if label in reported else []
    bodies = [tag("tbody", join(*rows))]
    if reported:
        lead = tag("th", "Reported by the paper, not run here", scope="rowgroup", colspan=len(sheet.columns) + 1)
        bodies.append(tag("tbody", tag("tr", lead, class_="lead-in"), join(*reported.values())))
    heads = [tag("th", breakable(grid.heading(c)), scope="col", class_=_kind(c)) for c in sheet.columns]
    yield scrolled_table("Accuracy by method and domain", [tag("th", "method", scope="col"), *heads], bodies)
    if not all(map(grid.complete, grid.rows)):
        partial = "† Not run on every domain: its mean is over those it was run on, and is compared with no other."
        yield tag("p", partial, class_="note")
    if paper:
        notes = items("ol", [*_published_notes(grid, paper), *paper.doubts])
        yield tag("aside", tag("h3", "About the paper's rows"), tag("p", paper.caption), notes, id="paper")


def _cell(grid: Grid, row: RowKey, column: Column, limit: float) -> Html:
    """Return the table cell of a row and column, with accuracy, deviation and gain."""
    cell, gain = grid.cell(row, column), grid.gain(row, column)
    if cell is None:
        return _nothing(column)
    number = f"{cell.accuracy:.1f}"
    unranked = "unranked" if row not in grid.compared(column) else None
    return tag(
        "td",
        tag("b", number) if grid.best(row, column) else number,
        tag("small", f"±{cell.deviation:.1f}") if cell.deviation is not None else "",
        tag("span", str(gain).replace("-", MINUS), class_="gain") if gain else "",
        class_=" ".join(filter(None, (_kind(column), _side(gain), _tint(gain, limit), unranked))) or None,
        title=_said(gain),
    )


def _nothing(column: Column) -> Html:
    """Return a table cell without a value."""
    return tag("td", tag("span", DASH, aria_hidden="true"), tag("span", "none", class_="unseen"), class_=_kind(column))


def _kind(column: Column) -> str | None:
    """Return the CSS class of a column."""
    return "summary" if isinstance(column, Summary) else None


def _side(gain: Difference | None) -> str | None:
    """Return "up" or "down" if a gain over the source model is more than chance, and None otherwise."""
    return None if gain is None or not gain.beyond_chance else "up" if gain.points > 0 else "down"


def _said(gain: Difference | None) -> str | None:
    """Return the description of a gain, for the title of its cell."""
    if gain is None:
        return None
    sure = "" if gain.interval is None else ", more than chance" if gain.beyond_chance else ", within chance"
    return f"{gain} points above source{sure}".replace("-", MINUS)


def _tint(gain: Difference | None, limit: float) -> str | None:
    """Return the CSS class that sets the strength of the colour of a cell, in per cent.

    The strength is proportional to the square root of the gain, so that small gains are visible beside a collapse.
    """
    return f"tint{100 * math.sqrt(abs(gain.points) / limit):.0f}" if gain and _side(gain) else None


def _scale(gains: Sequence[Difference], limit: float) -> Html:
    """Return the legend of the colours."""
    sides = {_side(gain) for gain in gains} - {None}
    if not sides:
        return Html()
    steps = [Difference(points, 0.0) for points in (-limit, -limit / 4, 0.0, limit / 4, limit)]
    shown = [step for step in steps if not step.points or _side(step) in sides]
    texts = [f"{step.points:+.1f}".replace("-", MINUS) if step.points else "0" for step in shown]
    classes = [" ".join(filter(None, (_side(step), _tint(step, limit)))) or None for step in shown]
    marks = [tag("span", text, class_=kind) for kind, text in zip(classes, texts)]
    return tag("p", "Points above source; coloured where that is more than chance: ", *marks, class_="scale")


def _published_rows(sheet: Sheet, paper: PublishedTable) -> dict[str, Html]:
    """Return the rows of the published table, by method."""
    mark = tag("a", "paper", href="#paper", title="About the paper's rows")
    rows = {}
    for method, published in paper.beside(sheet.grid).items():
        cells = []
        for column in sheet.columns:
            value, deviation = published.accuracy.get(column), published.deviation.get(column)
            small = "" if deviation is None else tag("small", f"±{deviation:.1f}")
            cells.append(_nothing(column) if value is None else tag("td", f"{value:.1f}", small, class_=_kind(column)))
        name = join(tag("span", f"{method}, ", class_="unseen"), mark) if method in sheet.runs else method
        rows[method] = tag("tr", tag("th", name, scope="row"), *cells, class_="paper")
    return rows


def _published_notes(grid: Grid, paper: PublishedTable) -> Iterator[str]:
    """Yield sentences about the differences between the published table and this one.

    Doubts about the published table itself are part of that table.
    """
    if not paper.printed:
        yield "The paper's source has this table, but it was not printed."
    if paper.model != grid.model:
        yield f"The paper's model is {paper.model or 'not stated'}; here it is {grid.model}."
    for line in paper.mismatches(grid):
        yield f"Not the same: {line}."
    rows, shared = paper.beside(grid), paper.shared(grid)
    if paper.averages and not any(Summary.MEAN in row.accuracy for row in rows.values()):
        over = f"over {len(paper.columns)} columns and ours over {len(grid.domains)}, {len(shared)} of them the same"
        yield f"The paper's mean is {over}: the means do not compare, and it is left out."
    if grid.source and grid.label(grid.source) in rows:
        theirs = rows[grid.label(grid.source)].accuracy
        pairs = [(cell.accuracy, theirs[c]) for c in shared if c in theirs and (cell := grid.cell(grid.source, c))]
        if pairs:
            here, there = (fmean(values) for values in zip(*pairs))
            apart = f"source is {here:.1f} here and {there:.1f} in the paper, {abs(here - there):.1f} points apart"
            yield f"Where both are known, {apart}. Rows compare only where this is small."
