"""Marks of points on a map: colours and markers by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..data.corruptions import Integers
from .figures import HUES
from .intervals import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLASSES = 10  # that get a colour; the others are grey
GREY = "#c8c8c8"


def look(kind: int) -> tuple[str, str]:
    """Return colour and marker of a kind: when the colours are used up, the next marker begins."""
    return (GREY, "o") if kind < 0 else (HUES[kind % len(HUES)], "o^sDv"[kind // len(HUES) % 5])


def scatter(axes: Axes, places: Floats, kinds: Integers) -> None:
    """Draw points in the colours of their kinds."""
    order = np.random.RandomState(0).permutation(len(kinds))  # so that no kind lies on top of all others
    looks = [look(kind) for kind in kinds[order]]
    for marker in dict.fromkeys(marker for _, marker in looks):
        which = [i for i, (_, other) in enumerate(looks) if other == marker]
        x, y = places[order[which]].T
        colours = [looks[i][0] for i in which]
        axes.scatter(x, y, s=6, c=colours, marker=marker, linewidths=0, alpha=0.75, rasterized=True)
    axes.set(xticks=[], yticks=[])
    axes.spines[["top", "right"]].set_visible(True)


def legend(axes: Axes, names: Mapping[int, str]) -> None:
    """Draw the names of the kinds beside the axes."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", marker=look(kind)[1], color=look(kind)[0], markersize=5, label=name)
        for kind, name in names.items()
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, handletextpad=0.1)


def most_frequent(labels: Integers, names: Sequence[str]) -> tuple[Integers, dict[int, str]]:
    """Return the classes that get a colour, numbered anew, and their names; the others are -1."""
    values, counts = np.unique(labels, return_counts=True)
    shown = np.sort(values[np.argsort(-counts, kind="stable")][:CLASSES])
    kinds = np.full_like(labels, -1)
    for i, value in enumerate(shown):
        kinds[labels == value] = i
    known = {i: names[value] if value < len(names) else f"class {value}" for i, value in enumerate(shown)}
    return kinds, known if len(shown) == len(values) else {**known, -1: f"{len(values) - len(shown)} others"}
