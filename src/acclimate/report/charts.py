"""Drawings for the page: lines in small panels, and labelled dots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .html import Html, breakable, join, tag

Curve = tuple[Sequence[float], Sequence[float]]  # positions, values
Marks = Mapping[str, Mapping[str, object]]  # by name, the attributes of the elements that represent it
Box = tuple[float, float, float, float]  # left, top, right, bottom

LONGEST = 20  # number of characters in the label of a dot
AROUND = ((1, 0), (-1, 0), (0, -1), (0, 1), (0.7, -0.7), (0.7, 0.7), (-0.7, -0.7), (-0.7, 0.7))  # directions of a label
AWAY = (9, 18, 28, 40, 54, 70)  # distances of a label from its dot


@dataclass(frozen=True)
class Scale:
    """A map from values to coordinates in a drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high, value = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[float]:
        """The values of the ticks."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            return [d * 10.0**p for p in powers for d in (1, 2, 5) if self.low <= d * 10.0**p <= self.high]
        step = round_step((self.high - self.low) / 6)
        return [i * step for i in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def round_step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


def panels(lines: Mapping[str, Mapping[str, Curve]], marks: Marks) -> tuple[Html, float]:
    """Draw accuracy in per cent against images: a panel for each stream, with a line for each method, the last on top.

    All panels span the same number of points, though not the same values, so that slopes are comparable. Return the drawings
    and this number of points.
    """
    ranges = {}
    for stream, curves in lines.items():
        values = [value for _, ys in curves.values() for value in ys]
        ranges[stream] = min(values), max(values)
    step = round_step(max(1.0, *(high - low for low, high in ranges.values())) / 5)  # 100 is a multiple of it
    steps = max(1, *(math.ceil(high / step) - math.floor(low / step) for low, high in ranges.values()))
    size = (560, 280) if len(lines) == 1 else (350, 200) if len(lines) <= 3 else (256, 176)
    figures = []
    for stream, curves in lines.items():
        low, high = ranges[stream]
        least, most = max(math.ceil(high / step) - steps, 0), min(math.floor(low / step), round(100 / step) - steps)
        start = step * ((least + most) // 2)
        images = max(xs[-1] for xs, _ in curves.values())
        ends = {name: f"{name} {ys[-1]:.1f} %" for name, (_, ys) in curves.items()}
        about = f"{stream}: running top-1 accuracy over {images:,.0f} images. At the end: "
        drawing = _panel(about, curves, ends, marks, (start, start + step * steps), size, "%", f"{images:,.0f} images")
        figures.append(tag("figure", tag("figcaption", breakable(stream)), drawing))
    return _beside(figures, size[0]), step * steps


def courses(lines: Mapping[str, Mapping[str, Curve]], marks: Marks) -> Html:
    """Draw non-negative quantities against the share of the stream in per cent: a panel for each quantity."""
    size, figures = (350, 200), []
    for what, curves in lines.items():
        highest = max(max(ys) for _, ys in curves.values())
        step = round_step(max(highest, 1e-6) / 5)
        ends = {name: f"{name} {ys[-1]:.3g}" for name, (_, ys) in curves.items()}
        about, limits = f"{what} along the stream. At the end: ", (0.0, step * math.ceil(highest / step) or step)
        drawing = _panel(about, curves, ends, marks, limits, size, "", "100 % of the stream")
        figures.append(tag("figure", tag("figcaption", what), drawing))
    return _beside(figures, size[0])


def _beside(figures: Sequence[Html], width: int) -> Html:
    """Return figures in columns of this width, for which the style sheet has a class."""
    return tag("div", join(*figures), class_=f"panels panel{width}")


def _panel(
    about: str,
    curves: Mapping[str, Curve],
    ends: Mapping[str, str],
    marks: Marks,
    limits: tuple[float, float],
    size: tuple[int, int],
    unit: str,
    until: str,
) -> Html:
    """Draw one panel with a line for each method."""
    left, top, right, bottom = 38, 8, size[0] - 4, size[1] - 22
    x, y = Scale(0, max(xs[-1] for xs, _ in curves.values()), left, right), Scale(*limits, bottom, top)
    return _svg(
        size,
        f"{about}{', '.join(reversed(list(ends.values())))}.",
        *_rules(y, left, right, unit),
        tag("text", "0", x=left, y=size[1] - 6),
        tag("text", until, x=right, y=size[1] - 6, text_anchor="end"),
        *(
            tag(
                "polyline",
                tag("title", ends[name]),
                points=" ".join(f"{x(a)},{y(b)}" for a, b in zip(xs, ys)),
                **marks[name],
            )
            for name, (xs, ys) in curves.items()
        ),
    )


def scatter(dots: Mapping[str, tuple[float, float]], marks: Marks) -> Html:
    """Draw mean accuracy in per cent against time per image.

    A line joins the methods that no other method beats in both.
    """
    size, left, top, right, bottom = (460, 350), 34, 26, 448, 306
    times, accuracies = zip(*dots.values())
    low, high = min(times), max(times)
    log = low > 0 and high > 10 * low
    room = 0.1 * math.log(high / low) if log else max(0.12 * (high - low), 0.1 * high) or 1.0
    x = Scale(*((low / math.exp(room), high * math.exp(room)) if log else (low - room, high + room)), left, right, log)
    room = max(0.12 * (max(accuracies) - min(accuracies)), 0.5)
    y = Scale(min(accuracies) - room, max(accuracies) + room, bottom, top)
    places = {name: (x(time), y(accuracy)) for name, (time, accuracy) in dots.items()}
    front = [places[name] for name in frontier(dots)]
    said = {name: f"{name}: {accuracy:.1f} % at {time:.3g} ms" for name, (time, accuracy) in dots.items()}
    return _svg(
        size,
        f"Mean top-1 accuracy against milliseconds per image. {', '.join(said.values())}.",
        *_rules(y, left, right),
        *(tag("text", f"{tick:g}", x=x(tick), y=bottom + 18, text_anchor="middle") for tick in x.ticks),
        tag("text", "milliseconds per image" + (", log scale" if log else ""), x=right, y=size[1] - 6, text_anchor="end"),
        tag("text", "mean top-1, %", x=0, y=12),
        tag("polyline", points=" ".join(f"{a},{b}" for a, b in front), class_="front"),
        *_labelled(places, said, marks, (left, top, right, bottom)),
    )


def frontier(dots: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names of the dots that are more accurate than all faster ones, from fast to slow."""
    best, found = -math.inf, []
    for name, (_, accuracy) in sorted(dots.items(), key=lambda item: (item[1][0], -item[1][1])):
        if accuracy > best:
            best = accuracy
            found.append(name)
    return found


def _labelled(places: Mapping[str, tuple[float, float]], said: Mapping[str, str], marks: Marks, plot: Box) -> Iterator[Html]:
    """Draw dots and their names, each name at the nearest position where it covers neither a dot nor another name."""
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in places.values()]
    for name, (x, y) in places.items():
        text = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
        half = 3.4 * len(text)  # about half of the width of the text
        tried = ((dx, dy, away) for away in AWAY for dx, dy in AROUND)
        spots = ((x + dx * (away + half), y + dy * (away + 4), dx * away, dy * (away - 3)) for dx, dy, away in tried)
        free = (s for s in spots if _fits(_box(s[0], s[1], half), plot, taken))
        at_x, at_y, lead_x, lead_y = next(free, (x + half + AWAY[0], y, 0, 0))
        taken.append(_box(at_x, at_y, half))
        far = math.hypot(lead_x, lead_y) > AWAY[0] + 1
        yield tag(
            "g",
            tag("title", said[name]),
            tag("line", x1=x, y1=y, x2=round(x + lead_x, 1), y2=round(y + lead_y, 1)) if far else "",
            tag("circle", cx=x, cy=y, r=5),
            tag("text", text, x=round(at_x, 1), y=round(at_y + 4, 1), text_anchor="middle"),
            **marks[name],
        )


def _box(x: float, y: float, half: float) -> Box:
    """Return the box of a label with this centre and half width."""
    return x - half, y - 7, x + half, y + 7


def _fits(box: Box, plot: Box, taken: Sequence[Box]) -> bool:
    """Return whether a box is inside the plot and overlaps none of the other boxes."""
    inside = plot[0] <= box[0] and plot[1] <= box[1] and box[2] <= plot[2] and box[3] <= plot[3]
    return inside and not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken)


def _rules(y: Scale, left: float, right: float, unit: str = "") -> Iterator[Html]:
    """Draw horizontal lines with their values; the uppermost value has the unit."""
    for number, tick in enumerate(reversed(y.ticks)):
        yield tag("line", x1=left, x2=right, y1=y(tick), y2=y(tick), class_="rule")
        yield tag("text", f"{tick:g}" + ("" if number else unit), x=left - 5, y=y(tick) + 4, text_anchor="end")


def _svg(size: tuple[int, int], title: str, *inside: str) -> Html:
    """Return an SVG drawing with a title for screen readers."""
    box = f"0 0 {size[0]} {size[1]}"
    return tag("svg", tag("title", title), join(*inside), viewBox=box, role="img", aria_label=title)
