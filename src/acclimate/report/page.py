"""Results as a web page: one file that needs no network, to be sent to a colleague or kept beside the runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..evaluation.journal import steps_of
from ..evaluation.store import Outcome
from ..evaluation.tables import Grid
from ..papers.dct.reported import Reported
from .charts import Curve, courses, frontier, panels, scatter
from .html import Html, breakable, join, tag

if TYPE_CHECKING:
    from ..analysis.figures import Kept

SUMMARIES = ("mean", "2nd half")  # the columns of a grid that are not a domain
HUES = 7  # lines that can be told apart; the methods beyond the best so many are grey until they are picked
WARM_UP = 0.05  # share of a stream that curves leave out, since a few images decide its running accuracy
DASH, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
SEEN = 0.05  # points that are printed as 0.1 and more
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"  # nothing is fetched
POINTS = 25  # of a line of health


def page(
    outcomes: Sequence[Outcome],
    *,
    title: str,
    paper: Reported | None = None,
    notes: Sequence[str] = (),
    figures: Sequence[Kept] = (),
) -> str:
    """A table of results, the curves, the health and the costs behind it, figures, and the protocol, as HTML.

    Args:
        outcomes: Runs that belong in one table. If their protocols differ, the page says so first.
        title: Of the page.
        paper: A table of the paper, whose rows are shown beside those of the same methods.
        notes: Sentences for the end of the page.
        figures: Of `acclimate analyze`.
    """
    sheet = Sheet(outcomes)
    paper = paper and _fitting(paper, outcomes[0])
    notes = [note for note in notes if note not in sheet.grid.differences]
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", _packaged("page.css")),
    )
    body = join(
        tag("header", tag("h1", title), tag("button", "Dark", id="theme", type="button", hidden=True)),
        tag("p", _summary(sheet), class_="lead"),
        _warning(sheet.grid.differences),
        _section("Accuracy", *_accuracy(sheet, paper)),
        _section("Along the stream", *_curves(sheet)),
        _section("Health", *_health(sheet)),
        _section("Cost", tag("div", _time(sheet), _costs(sheet), class_="beside")),
        _section("Events", *_events(sheet)),
        *(_section(figure.title, *_figure(figure)) for figure in figures),
        _section("Protocol", *_protocol(sheet, title)),
        _section("Notes", _items("ul", notes)),
    )
    script = tag("script", _packaged("page.js"))
    return "<!doctype html>\n" + tag("html", tag("head", head), tag("body", tag("main", body), script), lang="en")


class Sheet:
    """What several parts of the page need: the grid, who can be ranked by a mean, and everybody's colour."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.grid = grid = Grid(outcomes, mix=True)
        self.outcomes, self.methods = outcomes, grid.methods
        self.domains = [column for column in grid.columns if column not in SUMMARIES]
        self.columns = [*SUMMARIES, *self.domains]  # a narrow screen shows the first ones
        self.runs = {method: [o for o in outcomes if o.spec.method == method] for method in self.methods}
        self.seeds = len({o.spec.seed for o in outcomes})
        # A mean over other domains is another quantity: who was not run on all of them is not ranked by it.
        self.whole = [m for m in self.methods if all(grid.cell(m, domain) for domain in self.domains)]
        self.fair = Grid([o for m in self.whole for o in self.runs[m]], mix=True) if self.whole else None
        self.means = {m: cell[0] for m in self.whole if self.fair and (cell := self.fair.cell(m, "mean"))}
        self.ranked = sorted(self.methods, key=lambda m: -self.means.get(m, -1))
        hues = iter([f"hue{number}" for number in range(HUES)])
        hue = {m: "source" if m == "source" else next(hues, "rest") for m in self.ranked}
        self.number = {m: number for number, m in enumerate(self.methods)}
        self.marks = {m: {"class_": hue[m], "data_m": self.number[m]} for m in self.methods}
        titles = dict.fromkeys(title for o in outcomes for title in o.spec.domains)
        self.names = dict(zip(titles, self.domains))  # of columns, by the title of their domain

    def judge(self, method: str, column: str) -> Grid | None:
        """The grid in which a cell is compared with others, if it can be."""
        return self.grid if column in self.domains else self.fair if method in self.whole else None

    def gain(self, method: str, column: str) -> float:
        judge = self.judge(method, column)
        return judge.gain(method, column) if judge else 0.0

    def stream(self, outcome: Outcome) -> str:
        """What an outcome's stream is called."""
        first, *rest = [self.names[title] for title in outcome.spec.domains]
        return f"{first} to {rest[-1]}, {len(rest) + 1} domains in one stream ({outcome.spec.setting})" if rest else first


def _summary(sheet: Sheet) -> str:
    """The result in one sentence."""
    counts = [int(_sum(runs, "samples")) for runs in sheet.runs.values()]
    images = " to ".join(f"{count:,}" for count in dict.fromkeys((min(counts), max(counts))))
    scope = f"({_several(len(sheet.domains), 'domain')}, {_several(sheet.seeds, 'seed')}, {images} images for each method)"
    means, fair = sheet.means, sheet.fair
    if fair is None:
        return f"No method was run on every domain, so none is the best on average {scope}."
    first = [m for m in sheet.whole if fair.best(m, "mean")]
    after = [m for m in sheet.ranked if m in means and m not in first]
    reached = f"{means[first[0]]:.1f} % accuracy"
    if len(means) == 1:
        only = ", the only method that was run on every domain," if len(sheet.methods) > 1 else ""
        return f"{first[0]}{only} reaches {reached} on average {scope}."
    if "source" in first:
        equal = _listed([m for m in first if m != "source"])
        near = (
            f"{equal} reaches as much"
            if equal
            else f"{after[0]} is nearest, {-fair.gain(after[0], 'mean'):.1f} points below"
        )
        return f"No method is above the source model on average, which reaches {reached}; {near} {scope}."
    leads = [f"{fair.gain(first[0], 'mean'):.1f} points above the source model"] if "source" in means else []
    if after and after[0] != "source":
        leads.append(f"{means[first[0]] - means[after[0]]:.1f} {'' if leads else 'points '}above {after[0]}, the next best")
    best = f"{_listed(first)} {'is' if len(first) == 1 else 'are'} best on average with {reached}"
    return ", ".join(filter(None, (best, " and ".join(leads)))) + f" {scope}."


def _warning(differences: Sequence[str]) -> Html:
    lead = tag("p", "These results were made under different protocols: compare them with care.")
    return tag("div", lead, _items("ul", differences), class_="warning", role="note") if differences else Html()


def _accuracy(sheet: Sheet, paper: Reported | None) -> Iterator[Html]:
    spread = ", ± standard deviation over seeds" if sheet.seeds > 1 else ""
    about = f"Top-1 accuracy in per cent{spread}; the best of each column is bold. The mean counts every domain alike, and "
    yield tag("p", about + "so does that over the second half of each domain's images, when adaptation has had its time.")
    gains = [sheet.gain(m, c) for m in sheet.methods for c in sheet.columns]
    limit = max(map(abs, gains))
    yield _scale(gains, limit)
    reported = _paper_rows(sheet, paper) if paper else {}
    rows = []
    for method in sheet.methods:
        cells = [_cell(sheet, method, column, limit) for column in sheet.columns]
        partial = tag("sup", "†") if method not in sheet.whole else ""
        rows.append(tag("tr", tag("th", method, partial, scope="row", title=method), *cells, data_m=sheet.number[method]))
        rows += [reported.pop(method)] if method in reported else []
    bodies = [tag("tbody", join(*rows))]
    if reported:
        lead = tag("th", "Reported by the paper, not run here", scope="rowgroup", colspan=len(sheet.columns) + 1)
        bodies.append(tag("tbody", tag("tr", lead, class_="lead-in"), join(*reported.values())))
    heads = [tag("th", breakable(c), scope="col", class_=_kind(c)) for c in sheet.columns]
    yield _table("Accuracy by method and domain", [tag("th", "method", scope="col"), *heads], bodies)
    if len(sheet.whole) < len(sheet.methods):
        partial = "† Not run on every domain: its mean is over those it was run on, and is compared with no other."
        yield tag("p", partial, class_="note")
    if paper:
        notes = _items("ol", [*_paper_notes(sheet, paper), *paper.doubts])
        yield tag("aside", tag("h3", "About the paper's rows"), tag("p", paper.caption), notes, id="paper")


def _cell(sheet: Sheet, method: str, column: str, limit: float) -> Html:
    if sheet.grid.cell(method, column) is None:
        return _nothing(column)
    judge, gain = sheet.judge(method, column), sheet.gain(method, column)
    number, sign, spread = sheet.grid.text(method, column).partition("±")
    best = judge is not None and judge.best(method, column)
    return tag(
        "td",
        tag("b", number) if best else number,
        tag("small", sign + spread) if sign else "",
        class_=" ".join(filter(None, (_kind(column), _side(gain), None if judge else "unranked"))) or None,
        style=_tint(gain, limit),
        title=f"{_signed(gain)} points over source" if _side(gain) else None,
    )


def _nothing(column: str) -> Html:
    return tag("td", tag("span", DASH, aria_hidden="true"), tag("span", "none", class_="unseen"), class_=_kind(column))


def _kind(column: str) -> str | None:
    return "summary" if column in SUMMARIES else None


def _scale(gains: Sequence[float], limit: float) -> Html:
    """What the tints mean."""
    sides = set(map(_side, gains))
    shown = [gain for gain in (-limit, -limit / 4, 0.0, limit / 4, limit) if not gain or _side(gain) in sides]
    steps = [tag("span", _signed(gain), class_=_side(gain), style=_tint(gain, limit)) for gain in shown]
    return tag("p", "Points over source: ", *steps, class_="scale") if sides != {None} else Html()


def _side(gain: float) -> str | None:
    return "up" if gain >= SEEN else "down" if gain <= -SEEN else None


def _tint(gain: float, limit: float) -> str | None:
    """It grows with the root of the gain, so that small ones are seen beside a collapse."""
    return f"--tint:{math.sqrt(abs(gain) / limit):.2f}" if _side(gain) else None


def _fitting(paper: Reported, outcome: Outcome) -> Reported:
    """Where the columns of the paper's table are settings or severities, that of these runs."""
    if not paper.unit.startswith("accuracy"):
        raise ConfigError(f"The paper's table {paper.key!r} has {paper.unit}, which cannot stand beside accuracies.")
    of_run = (outcome.spec.setting, outcome.spec.domains[0].partition("/")[2])
    return next((paper.only(column) for column in of_run if column in paper.columns), paper)


def _paper_rows(sheet: Sheet, paper: Reported) -> dict[str, Html]:
    mark = tag("a", "paper", href="#paper", title="About the paper's rows")
    shared, rows = _shared(sheet, paper), {}
    for method in paper.rows:
        values = _paper_values(paper.row(method), paper.averages.get(method), shared)
        deviations = dict(zip(paper.columns, paper.deviations.get(method, ())))
        spreads = _paper_values(deviations, paper.average_deviations.get(method), shared)
        cells = []
        for column in sheet.columns:
            small = tag("small", f"±{spreads[column]:.1f}") if column in spreads else ""
            known = column in values
            cells.append(tag("td", f"{values[column]:.1f}", small, class_=_kind(column)) if known else _nothing(column))
        name = join(tag("span", f"{method}, ", class_="unseen"), mark) if method in sheet.methods else method
        rows[method] = tag("tr", tag("th", name, scope="row"), *cells, class_="paper")
    return rows


def _paper_values(row: Mapping[str, float], average: float | None, shared: Mapping[str, str]) -> dict[str, float]:
    values = {ours: row[theirs] for ours, theirs in shared.items() if theirs in row}
    return values if average is None else {**values, "mean": average}


def _shared(sheet: Sheet, paper: Reported) -> dict[str, str]:
    """Which of our columns is which of the paper's: the same corruption at the same severity."""
    if len(paper.columns) == 1:
        return {"mean": paper.columns[0]}
    parts = {column: title.partition("/") for title, column in sheet.names.items()}
    same = {column: level in ("", str(paper.severity)) for column, (_, _, level) in parts.items()}
    return {column: name for column, (name, _, _) in parts.items() if name in paper.columns and same[column]}


def _paper_notes(sheet: Sheet, paper: Reported) -> Iterator[str]:
    """What is different here, computed; what is doubtful there comes with the table."""
    spec, shared = sheet.outcomes[0].spec, _shared(sheet, paper)
    severities = sorted({title.partition("/")[2] for title in sheet.names} - {""})
    if not paper.printed:
        yield "The paper's source has this table, but it was not printed."
    if paper.model != spec.model["name"]:
        yield f"The paper's model is {paper.model or 'not stated'}; here it is {spec.model['name']}."
    if paper.setting not in (None, spec.setting):
        yield f"The paper's setting is {paper.setting}; here it is {spec.setting}."
    if paper.severity and severities not in ([], [str(paper.severity)]):
        yield f"The paper's severity is {paper.severity}; here it is {_listed(severities)}."
    if len(paper.columns) > 1 and not len(shared) == len(paper.columns) == len(sheet.domains):
        over = f"over {len(paper.columns)} columns and ours over {len(sheet.domains)}, {len(shared)} of them the same"
        yield f"The paper's mean is {over}: the means do not compare."
    source = paper.row("source") if "source" in paper.rows else {}
    pairs = [(cell[0], source[c]) for ours, c in shared.items() if c in source and (cell := sheet.grid.cell("source", ours))]
    if pairs:
        here, there = (fmean(values) for values in zip(*pairs))
        apart = f"source is {here:.1f} here and {there:.1f} in the paper, {abs(here - there):.1f} points apart"
        yield f"Where both are known, {apart}. Rows compare only where this is small."


def _curves(sheet: Sheet) -> Iterator[Html]:
    found: dict[str, dict[str, list[list[tuple[int, float]]]]] = {}
    for method in reversed(sheet.ranked):  # the best is drawn last, on top
        for outcome in sheet.runs[method]:
            found.setdefault(sheet.stream(outcome), {}).setdefault(method, []).append(outcome.result.curve)
    streams = dict.fromkeys(map(sheet.stream, sheet.outcomes))
    lines = {stream: {m: _mean_curve(each) for m, each in found[stream].items()} for stream in streams}
    drawn, span = panels(lines, sheet.marks)
    mean = ", mean over seeds" if sheet.seeds > 1 else ""
    equal = f" Each panel spans {span:g} points, so that they compare." if len(lines) > 1 else ""
    yield tag("p", f"Top-1 accuracy so far against images so far{mean}, after the first {WARM_UP:.0%} of them.{equal}")
    names = []
    for method in sheet.methods:
        line = tag("line", x1=1, x2=25, y1=5, y2=5, **sheet.marks[method])
        sample = tag("svg", line, viewBox="0 0 26 10", aria_hidden="true")
        pick = tag("button", sample, method, type="button", data_pick=sheet.number[method], aria_pressed="false")
        names.append(tag("li", pick))
    yield tag("ul", join(*names), class_="legend", aria_label="Methods; press one to bring it out")
    yield drawn


def _mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> Curve:
    """Images and per cent. Seeds share their numbers of images; should they not, the first one's are taken."""
    end = min(curve[-1][0] for curve in curves)
    where = [images for images, _ in curves[0] if WARM_UP * end <= images <= end]
    each = [np.interp(where, *np.array(curve, dtype=float).T) for curve in curves]
    return where, (100 * np.mean(each, axis=0)).tolist()


def _health(sheet: Sheet) -> Iterator[Html]:
    """Drawn of the runs that are on disk with their steps."""
    lines: dict[str, dict[str, Curve]] = {}
    where = np.linspace(0, 1, POINTS)
    for method in reversed(sheet.ranked):
        runs = [steps for o in sheet.runs[method] if o.folder is not None and (steps := steps_of(o.folder))]
        each = [_vital(steps) for steps in runs]
        for what in each[0] if each else ():
            course = np.mean([_course(vital[what], where) for vital in each], axis=0)
            lines.setdefault(what, {})[method] = (100 * where).tolist(), course.tolist()
    if not lines:
        return
    about = "Means over each method's runs. A method in good health stays sure of what it sees without becoming certain of "
    about += (
        "everything (an entropy that falls towards 0 is the sign of a collapse), goes on finding images to learn from, and "
    )
    yield tag("p", about + "moves away from the source slowly. What the guard and the methods' own recoveries did is below.")
    yield courses(lines, sheet.marks)


def _vital(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """What tells how a run is doing, step by step."""
    so_far = [0, *(step["images"] for step in steps)]
    return {
        "Entropy of the predictions, nats": _filled([step["entropy"] for step in steps]),
        "Share of the images learned from": [
            step["used"] / (now - before) for step, before, now in zip(steps, so_far, so_far[1:])
        ],
        "Distance from the source, relative": _filled([step["drift"] for step in steps]),
    }


def _filled(values: Sequence[float | None]) -> list[float]:
    """Where there was no number, that of the step before."""
    filled = [0.0]
    for value in values:
        filled.append(filled[-1] if value is None else value)
    return filled[1:]


def _course(values: Sequence[float], where: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The values of a run's steps, at shares of its stream; where there are more steps than shares, means between these."""
    ends = np.cumsum(values)
    count = len(values)
    width = max(1, round(count / len(where)))
    last = np.clip(np.round(where * count).astype(int), width, count)
    before = np.concatenate([[0.0], ends])
    return (before[last] - before[last - width]) / width


def _figure(figure: Kept) -> Iterator[Html]:
    yield tag("p", figure.caption)
    yield _items("ul", figure.findings)
    yield tag("figure", Html(figure.svg), class_="drawn")
    how = _definitions({name: [value] for name, value in figure.protocol.items()})
    yield tag("details", tag("summary", "How it was made"), how) if figure.protocol else Html()


def _time(sheet: Sheet) -> Html:
    dots = {m: (_milliseconds(sheet.runs[m]), sheet.means[m]) for m in sheet.ranked if m in sheet.means}
    if len(dots) < 2:
        return Html()
    words = ["Accuracy against time."]
    if len(frontier(dots)) > 1:
        words.append("The line joins those methods that no other is both faster and better than.")
    if len(dots) < len(sheet.methods):
        words.append(f"Not run on every domain, so not shown: {_listed([m for m in sheet.methods if m not in dots])}.")
    return tag("figure", tag("figcaption", " ".join(words)), scatter(dots, sheet.marks), class_="scatter")


def _costs(sheet: Sheet) -> Html:
    rows = []
    for method, runs in sheet.runs.items():
        samples = _sum(runs, "samples")
        peaks = [o.result.peak_mib for o in runs if o.result.peak_mib is not None]
        time = _milliseconds(runs)
        cells = {
            "ms per image": f"{time:,.0f}" if time >= 100 else f"{time:.3g}",
            "learned from": f"{100 * _sum(runs, 'used') / samples:.0f} %",
            "forward passes": f"{_sum(runs, 'forward') / samples:.2f}",
            "backward passes": f"{_sum(runs, 'backward') / samples:.2f}",
            "calibration error": f"{100 * fmean(o.result.ece for o in runs):.1f} %",
            "peak memory": f"{max(peaks):,.0f} MiB" if peaks else DASH,
            "seeds": str(len({o.spec.seed for o in runs})),
        }
        name = tag("th", method, scope="row", title=method)
        rows.append(tag("tr", name, *(tag("td", cell) for cell in cells.values()), data_m=sheet.number[method]))
    heads = [tag("th", name, scope="col") for name in ("method", *cells)]
    about = "Learned from: share of the images. Passes: for each image. Calibration error: mean over runs. "
    about += "Peak memory: the highest of all runs, beyond what was held before."
    return tag("div", _table("Cost by method", heads, [tag("tbody", join(*rows))]), tag("p", about, class_="note"))


def _events(sheet: Sheet) -> Iterator[Html]:
    kinds, rows = [], []
    for method, runs in sheet.runs.items():
        each = [Counter(event.partition(":")[0] for _, event in o.result.events) for o in runs]
        for kind in dict.fromkeys(kind for counts in each for kind in counts):
            times = _several(sum(counts[kind] for counts in each), "time")
            within = f"{sum(kind in counts for counts in each)} of {_several(len(runs), 'run')}"
            kinds.append(tag("li", tag("b", method), f": {kind}, {times} in {within}"))
        for outcome in runs:
            for event in dict.fromkeys(event for _, event in outcome.result.events):
                steps = _ranges([step for step, what in outcome.result.events if what == event])
                cells = (sheet.stream(outcome), str(outcome.spec.seed), event, steps)
                rows.append(tag("tr", tag("th", method, scope="row"), *(tag("td", cell) for cell in cells)))
    if kinds:
        heads = [tag("th", name, scope="col") for name in ("method", "stream", "seed", "event", "steps")]
        table = _table("Events by run", heads, [tag("tbody", join(*rows))], class_="words")
        yield tag("ul", join(*kinds))
        yield tag("details", tag("summary", "In which run, at which step"), table)


def _ranges(numbers: Sequence[int], most: int = 10) -> str:
    """1, 2, 3 and 7 as "1-3, 7"."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        begun = ranges.pop()[0] if ranges and number <= ranges[-1][1] + 1 else number
        ranges.append((begun, number))
    words = [f"{first}" if first == last else f"{first}{DASH}{last}" for first, last in ranges]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def _protocol(sheet: Sheet, title: str) -> Iterator[Html]:
    cards = [o.spec.shared for o in sheet.outcomes]
    lines = {key: list(dict.fromkeys(card[key] for card in cards if card.get(key))) for key in cards[0]}
    text = "\n".join([title, *(f"{key}: {'; or '.join(values)}" for key, values in lines.items() if values)])
    yield _definitions(lines)
    yield tag(
        "p", tag("button", "Copy as text", id="copy", type="button", hidden=True), tag("span", id="copied", role="status")
    )
    yield tag("details", tag("summary", "As text"), tag("pre", text, id="card"))
    configs = {
        m: [", ".join(f"{k}={v}" for k, v in o.spec.config.items()) or "none" for o in runs]
        for m, runs in sheet.runs.items()
    }
    options = _definitions({method: list(dict.fromkeys(each)) for method, each in configs.items()})
    yield tag("details", tag("summary", "Options of each method"), options)


def _definitions(lines: dict[str, list[str]]) -> Html:
    return tag(
        "dl", join(*(join(tag("dt", key), *(tag("dd", v) for v in values)) for key, values in lines.items() if values))
    )


def _table(label: str, heads: Sequence[Html], bodies: Sequence[Html], **attributes: object) -> Html:
    table = tag("table", tag("thead", tag("tr", *heads)), join(*bodies), **attributes)
    return tag("div", table, class_="scrolled", role="region", aria_label=label, tabindex=0)


def _section(heading: str, *inside: Html) -> Html:
    content = join(*inside)
    return tag("section", tag("h2", heading), content) if content else Html()


def _items(kind: str, sentences: Sequence[str]) -> Html:
    return tag(kind, join(*(tag("li", sentence) for sentence in sentences))) if sentences else Html()


def _packaged(name: str) -> Html:
    return Html(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _sum(runs: Sequence[Outcome], what: str) -> float:
    return sum(getattr(o.result, what) for o in runs)


def _milliseconds(runs: Sequence[Outcome]) -> float:
    return 1000 * _sum(runs, "seconds") / _sum(runs, "samples")


def _signed(points: float) -> str:
    return f"{points:+.1f}".replace("-", MINUS) if _side(points) else "0"


def _several(count: int | float, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
