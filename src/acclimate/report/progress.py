"""The curves of accuracy and health along the stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..evaluation.journal import steps_of
from .charts import Curve, courses, panels
from .html import Html, join, tag
from .sheet import Sheet

WARM_UP = 0.05  # share of a stream that curves leave out, since its running accuracy depends on few images
POINTS = 25  # number of points of a health curve


def accuracy_curves(sheet: Sheet) -> Iterator[Html]:
    """Yield the curves of running accuracy, with a panel for each stream."""
    found: dict[str, dict[str, list[list[tuple[int, float]]]]] = {}
    for label in reversed(sheet.ranked):  # the best method is drawn last, on top
        for outcome in sheet.runs[label]:
            found.setdefault(sheet.stream(outcome), {}).setdefault(label, []).append(outcome.result.curve)
    streams = dict.fromkeys(map(sheet.stream, sheet.grid.outcomes))
    lines = {stream: {label: _mean_curve(each) for label, each in found[stream].items()} for stream in streams}
    drawn, span = panels(lines, sheet.marks)
    mean = ", mean over seeds" if sheet.seeds > 1 else ""
    equal = f" Each panel spans {span:g} points, so that they compare." if len(lines) > 1 else ""
    yield tag("p", f"Top-1 accuracy so far against images so far{mean}, after the first {WARM_UP:.0%} of them.{equal}")
    names = []
    for label, number in sheet.number.items():
        line = tag("line", x1=1, x2=25, y1=5, y2=5, **sheet.marks[label])
        sample = tag("svg", line, viewBox="0 0 26 10", aria_hidden="true")
        pick = tag("button", sample, label, type="button", data_pick=number, aria_pressed="false")
        names.append(tag("li", pick))
    yield tag("ul", join(*names), class_="legend", aria_label="Methods; press one to bring it out")
    yield drawn


def _mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> Curve:
    """Return the mean over curves: numbers of images, and accuracies in per cent.

    The curves of all seeds usually have the same numbers of images. If they do not, those of the first curve are used.
    """
    end = min(curve[-1][0] for curve in curves)
    where = [images for images, _ in curves[0] if WARM_UP * end <= images <= end]
    each = [np.interp(where, *np.array(curve, dtype=float).T) for curve in curves]
    return where, (100 * np.mean(each, axis=0)).tolist()


def health_curves(sheet: Sheet) -> Iterator[Html]:
    """Yield the curves of entropy, share of images learned from, and distance from the source.

    Only runs whose steps are on disk have these curves.
    """
    lines: dict[str, dict[str, Curve]] = {}
    where = np.linspace(0, 1, POINTS)
    for label in reversed(sheet.ranked):
        each = [health(steps_of(o.folder, o.spec.id)) for o in sheet.runs[label] if o.folder is not None]
        for what in each[0] if each else ():
            course = np.mean([resampled(signs[what], where) for signs in each], axis=0)
            lines.setdefault(what, {})[label] = (100 * where).tolist(), course.tolist()
    if not lines:
        return
    about = "Means over each method's runs. A method in good health stays sure of what it sees without becoming certain of "
    about += (
        "everything (an entropy that falls towards 0 is the sign of a collapse), goes on finding images to learn from, and "
    )
    yield tag("p", about + "moves away from the source slowly. What the guard and the methods' own recoveries did is below.")
    yield courses(lines, sheet.marks)


def health(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the quantities that describe the health of a run, for each step."""
    so_far = [0, *(step["images"] for step in steps)]
    return {
        "Entropy of the predictions, nats": _filled([step["entropy"] for step in steps]),
        "Share of the images learned from": [
            step["used"] / (now - before) for step, before, now in zip(steps, so_far, so_far[1:])
        ],
        "Distance from the source, relative": _filled([step["drift"] for step in steps]),
    }


def _filled(values: Sequence[float | None]) -> list[float]:
    """Return the values, where a missing one is replaced by that of the step before."""
    filled = [0.0]
    for value in values:
        filled.append(filled[-1] if value is None else value)
    return filled[1:]


def resampled(values: Sequence[float], where: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the values of the steps of a run at shares of its stream.

    If there are more steps than shares, the values are means over the steps in between.
    """
    ends = np.cumsum(values)
    count = len(values)
    width = max(1, round(count / len(where)))
    last = np.clip(np.round(where * count).astype(int), width, count)
    before = np.concatenate([[0.0], ends])
    return (before[last] - before[last - width]) / width
