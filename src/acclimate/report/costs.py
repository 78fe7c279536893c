"""The costs of the methods, and the events in their runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from .accuracy import DASH
from .charts import frontier, scatter
from .html import Html, count, join, listed, scrolled_table, tag
from .sheet import Sheet, milliseconds, total


def cost_part(sheet: Sheet) -> Html:
    """Return the drawing of accuracy against time, and the table of costs beside it."""
    return tag("div", _time(sheet), _costs(sheet), class_="beside")


def _time(sheet: Sheet) -> Html:
    """Return the drawing of accuracy against time, or nothing if there are fewer than two methods to compare."""
    dots = {label: (milliseconds(sheet.runs[label]), mean) for label, mean in sheet.means.items()}
    if len(dots) < 2:
        return Html()
    words = ["Accuracy against time."]
    if len(frontier(dots)) > 1:
        words.append("The line joins those methods that no other is both faster and better than.")
    if len(dots) < len(sheet.runs):
        words.append(f"Not run on every domain, so not shown: {listed([m for m in sheet.runs if m not in dots])}.")
    return tag("figure", tag("figcaption", " ".join(words)), scatter(dots, sheet.marks), class_="scatter")


def _costs(sheet: Sheet) -> Html:
    """Return the table of costs."""
    rows = []
    for label, runs in sheet.runs.items():
        samples = total(runs, "samples")
        peaks = [o.result.peak_mib for o in runs if o.result.peak_mib is not None]
        time = milliseconds(runs)
        cells = {
            "ms per image": f"{time:,.0f}" if time >= 100 else f"{time:.3g}",
            "learned from": f"{100 * total(runs, 'used') / samples:.0f} %",
            "forward passes": f"{total(runs, 'forward') / samples:.2f}",
            "backward passes": f"{total(runs, 'backward') / samples:.2f}",
            "calibration error": f"{100 * fmean(o.result.ece for o in runs):.1f} %",
            "peak memory": f"{max(peaks):,.0f} MiB" if peaks else DASH,
            "seeds": str(len({o.spec.seed for o in runs})),
        }
        name = tag("th", label, scope="row", title=label)
        rows.append(tag("tr", name, *(tag("td", cell) for cell in cells.values()), data_m=sheet.number[label]))
    heads = [tag("th", name, scope="col") for name in ("method", *cells)]
    about = "Learned from: share of the images. Passes: for each image. Calibration error: mean over runs. "
    about += "Peak memory: the highest of all runs, beyond what was held before."
    return tag("div", scrolled_table("Cost by method", heads, [tag("tbody", join(*rows))]), tag("p", about, class_="note"))


def event_part(sheet: Sheet) -> Iterator[Html]:
    """Yield the number of events of each kind, and a table of the events in each run."""
    kinds, rows = [], []
    for label, runs in sheet.runs.items():
        each = [Counter(event.partition(":")[0] for _, event in o.result.events) for o in runs]
        for kind in dict.fromkeys(kind for counts in each for kind in counts):
            times = count(sum(counts[kind] for counts in each), "time")
            within = f"{sum(kind in counts for counts in each)} of {count(len(runs), 'run')}"
            kinds.append(tag("li", tag("b", label), f": {kind}, {times} in {within}"))
        for outcome in runs:
            for event in dict.fromkeys(event for _, event in outcome.result.events):
                steps = _ranges([step for step, what in outcome.result.events if what == event])
                cells = (sheet.stream(outcome), str(outcome.spec.seed), event, steps)
                rows.append(tag("tr", tag("th", label, scope="row"), *(tag("td", cell) for cell in cells)))
    if kinds:
        heads = [tag("th", name, scope="col") for name in ("method", "stream", "seed", "event", "steps")]
        table = scrolled_table("Events by run", heads, [tag("tbody", join(*rows))], class_="words")
        yield tag("ul", join(*kinds))
        yield tag("details", tag("summary", "In which run, at which step"), table)


def _ranges(numbers: Sequence[int], most: int = 10) -> str:
    """Return numbers as ranges, for example 1, 2, 3 and 7 as "1-3, 7"."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        begun = ranges.pop()[0] if ranges and number <= ranges[-1][1] + 1 else number
        ranges.append((begun, number))
    words = [f"{first}" if first == last else f"{first}{DASH}{last}" for first, last in ranges]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
