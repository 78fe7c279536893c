"""Which images a run got right, and how sure the difference between two runs is.

Two methods meet the same images, so their difference is a mean of differences image by image, and its error follows from
how these vary. An image that was met several times, under several corruptions or in several orders, counts once: images are
told apart by their index in their domain, and corruptions of one data set share their indices.

The interval says how far the difference would move with other images of the same kind. It does not cover other orders of
the stream: a method that adapts carries what it learned from one image to the next, so that one order is one sample.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.uint16]  # (half of the stream, met or right, image): how often
NORMAL_95 = 1.96  # standard errors on each side of a 95 % interval


@dataclass(frozen=True)
class Difference:
    """Holds the difference between two accuracies, in points."""

    points: float
    interval: float | None = None  # half the width of its 95 % interval; None where images cannot be paired

    @property
    def beyond_chance(self) -> bool:
        """Whether the interval is known and excludes zero."""
        return self.interval is not None and abs(self.points) > self.interval

    def __str__(self) -> str:
        return f"{round(self.points, 1) + 0.0:+.1f}" + ("" if self.interval is None else f"±{self.interval:.1f}")


def pack_counts(right: npt.NDArray[np.float64], index: npt.NDArray[np.int64], images: int) -> str:
    """Return how often each image of a domain was met and right, as text for a file.

    Args:
        right: In the order of the stream, 1 where the prediction was right and 0 where it was wrong.
        index: Which image of the domain that was.
        images: How many the domain has.
    """
    halves = slice(len(index) // 2), slice(len(index) // 2, None)
    counts = [np.bincount(index[half], what[half], images) for half in halves for what in (np.ones_like(right), right)]
    return base64.b64encode(zlib.compress(np.stack(counts).astype("<u2").tobytes(), 9)).decode()


def unpack_counts(text: str) -> Counts:
    """Return what `pack_counts` packed."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u2").reshape(2, 2, -1)


def paired_difference(pairs: Sequence[tuple[Counts, Counts]]) -> Difference:
    """Return by how many points the first of each pair is above the second, on average over the pairs.

    Args:
        pairs: Counts of two methods on one domain in one order, for each domain and order.
    """
    points, effects = 0.0, np.zeros(max(mine.shape[-1] for mine, _ in pairs))
    for mine, theirs in pairs:
        for sign, counts in ((1, mine), (-1, theirs)):
            met, right = counts.sum(0, dtype=float)
            accuracy = right.sum() / met.sum()
            points += sign * accuracy / len(pairs)
            effects[: len(met)] += sign * (right - accuracy * met) / met.sum() / len(pairs)
    images = np.count_nonzero(sum(np.pad(mine.sum((0, 1)), (0, len(effects) - mine.shape[-1])) for mine, _ in pairs))
    # plus one image's worth, as Agresti and Min (2005) do: a handful of differing predictions is no proof
    variance = np.square(effects).sum() * images / max(1, images - 1) + 1 / images**2
    return Difference(100 * float(points), 100 * NORMAL_95 * math.sqrt(variance))
