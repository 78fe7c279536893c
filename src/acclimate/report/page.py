"""The results as a web page: one file without network access, to send to a colleague or to keep beside the runs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Protocol

from ..evaluation.published import PublishedTable
from ..evaluation.tables import Grid, Summary
from .accuracy import TINTS, accuracy_part
from .costs import cost_part, event_part
from .html import Html, count, definitions, items, join, listed, section, tag
from .progress import accuracy_curves, health_curves
from .sheet import Sheet, total


class SavedFigure(Protocol):
    """A figure that `acclimate analyze` saved, as far as the page needs it."""

    @property
    def title(self) -> str:
        """The title of the figure, which is the heading of its section."""

    @property
    def caption(self) -> str:
        """The caption of the figure."""

    @property
    def findings(self) -> Sequence[str]:
        """Sentences about the results in the figure."""

    @property
    def protocol(self) -> Mapping[str, str]:
        """The settings with which the figure was made, by name."""

    @property
    def svg(self) -> str:
        """The drawing."""


def page(
    grid: Grid,
    *,
    title: str,
    paper: PublishedTable | None = None,
    notes: Sequence[str] = (),
    figures: Sequence[SavedFigure] = (),
) -> str:
    """Return the table of results with its curves, health, costs and events, figures, and the protocol, as HTML.

    Args:
        grid: The table of results. If the protocols of its runs differ, the page starts with a warning.
        title: The title of the page.
        paper: A published table that was fitted to the grid. Its rows are shown beside those of the same methods.
        notes: Sentences for the end of the page.
        figures: Figures that `acclimate analyze` saved.
    """
    sheet = Sheet(grid)
    style, script = _packaged("page.css") + TINTS, _packaged("page.js")
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(style)),
    )
    body = join(
        tag("header", tag("h1", title), tag("button", "Dark", id="theme", type="button", hidden=True)),
        tag("p", _summary(sheet), class_="lead"),
        _warning(grid.differences),
        section("Accuracy", *accuracy_part(sheet, paper)),
        section("Along the stream", *accuracy_curves(sheet)),
        section("Health", *health_curves(sheet)),
        section("Cost", cost_part(sheet)),
        section("Events", *event_part(sheet)),
        *(section(figure.title, *_figure(figure)) for figure in figures),
        section("Protocol", *_protocol(sheet, title)),
        section("Notes", items("ul", notes)),
    )
    body = tag("body", tag("main", body), tag("script", Html(script)))
    return "<!doctype html>\n" + tag("html", tag("head", head), body, lang="en")


def _policy(style: str, script: str) -> str:
    """Return a policy by which a browser loads nothing, and uses no style and no script but these two."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    own = "style-src 'sha256-{}'; script-src 'sha256-{}'".format(*digests)
    return f"default-src 'none'; {own}; img-src data:; base-uri 'none'; form-action 'none'"


def _summary(sheet: Sheet) -> str:
    """Return the result in one sentence."""
    grid, column = sheet.grid, Summary.MEAN
    counts = [int(total(runs, "samples")) for runs in sheet.runs.values()]
    images = " to ".join(f"{number:,}" for number in dict.fromkeys((min(counts), max(counts))))
    scope = f"({count(len(grid.domains), 'domain')}, {count(sheet.seeds, 'seed')}, {images} images for each method)"
    ranked = grid.compared(column)
    if not ranked:
        return f"No method was run on every domain, so none is the best on average {scope}."
    top, *others = ranked
    name, reached = grid.label(top), f"{sheet.means[grid.label(top)]:.1f} % accuracy"
    if not others:
        only = ", the only method that was run on every domain," if len(grid.rows) > 1 else ""
        return f"{name}{only} reaches {reached} on average {scope}."

    def apart(row: int) -> str:
        difference = grid.difference(top, others[row], column)
        return f"{difference.points:.1f}" + ("" if difference.interval is None else f" ± {difference.interval:.1f}")

    if top == grid.source:
        near = f"{grid.label(others[0])} is nearest, {apart(0)} points below"
        return f"No method is above the source model on average, which reaches {reached}; {near} {scope}."
    leaders = grid.leaders(column)
    if grid.source in leaders:
        above = f"{reached} on average, {apart(others.index(grid.source))} points above it"
        return f"No method is above the source model by more than chance: {name} reaches {above} {scope}."
    leads = [f"{apart(others.index(grid.source))} points above the source model"] if grid.source in others else []
    if len(leaders) < 2 and others[0] != grid.source:
        leads.append(f"{apart(0)} {'' if leads else 'points '}above {grid.label(others[0])}, the next")
    best = f"{name} is {'best' if leaders == [top] else 'highest'} on average with {reached}"
    equal = [grid.label(row) for row in leaders[1:]]
    chance = f"; {listed(equal)} {'is' if len(equal) == 1 else 'are'} within chance of it" if equal else ""
    return ", ".join(filter(None, (best, " and ".join(leads)))) + f"{chance} {scope}."


def _warning(differences: Sequence[str]) -> Html:
    """Return a warning about different protocols, or nothing if there is no difference."""
    lead = tag("p", "These results were made under different protocols: compare them with care.")
    return tag("div", lead, items("ul", differences), class_="warning", role="note") if differences else Html()


def _figure(figure: SavedFigure) -> Iterator[Html]:
    """Yield the caption, the findings, the drawing and the protocol of a figure."""
    yield tag("p", figure.caption)
    yield items("ul", figure.findings)
    # an image, not markup, because a browser runs no script in an image
    source = f"data:image/svg+xml;base64,{base64.b64encode(figure.svg.encode()).decode()}"
    yield tag("figure", tag("img", src=source, alt=figure.title), class_="drawn")
    how = definitions({name: [value] for name, value in figure.protocol.items()})
    yield tag("details", tag("summary", "How it was made"), how) if figure.protocol else Html()


def _protocol(sheet: Sheet, title: str) -> Iterator[Html]:
    """Yield the protocol of the runs, also as plain text, and the options of each method."""
    cards = [outcome.spec.shared for outcome in sheet.grid.outcomes]
    lines = {key: list(dict.fromkeys(card[key] for card in cards if card.get(key))) for key in cards[0]}
    text = "\n".join([title, *(f"{key}: {'; or '.join(values)}" for key, values in lines.items() if values)])
    yield definitions(lines)
    yield tag(
        "p", tag("button", "Copy as text", id="copy", type="button", hidden=True), tag("span", id="copied", role="status")
    )
    yield tag("details", tag("summary", "As text"), tag("pre", text, id="card"))
    options = {label: [", ".join(map("=".join, row.options)) or "none"] for row, label in sheet.labels.items()}
    yield tag("details", tag("summary", "Options of each method"), definitions(options))


def _packaged(name: str) -> str:
    """Return the content of a file in this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
