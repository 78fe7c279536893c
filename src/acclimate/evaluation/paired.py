"""Counts of correct predictions per image, and confidence intervals of the difference between two runs.

Two methods get the same images. Their difference is therefore a mean of differences per image, and its standard error
follows from the variance of these. An image that occurs several times, with several corruptions or in several orders, counts
once. Images are identified by their index in their domain, and the corruptions of one data set share these indices.

The interval estimates how the difference would vary with other images of the same kind. It does not include the variation
with the order of the stream: a method that adapts depends on all earlier images, so that one order is one sample.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.uint16]  # occurrences and correct predictions: (half of the stream, 2, image)
NORMAL_95 = 1.96  # standard errors on each side of a 95 % interval


@dataclass(frozen=True)
class Difference:
    """The difference between two accuracies, in percentage points."""

    points: float
    interval: float | None = None  # half the width of the 95 % interval; None if images cannot be paired

    @property
    def beyond_chance(self) -> bool:
        """Whether the interval is known and excludes zero."""
        return self.interval is not None and abs(self.points) > self.interval

    def __str__(self) -> str:
        return f"{round(self.points, 1) + 0.0:+.1f}" + ("" if self.interval is None else f"±{self.interval:.1f}")


def pack_counts(right: npt.NDArray[np.float64], index: npt.NDArray[np.int64], images: int) -> str:
    """Return how often each image of a domain occurred and was predicted correctly, as text for a file.

    Args:
        right: 1 for a correct and 0 for a wrong prediction, in the order of the stream.
        index: The index of each image in its domain, in the order of the stream.
        images: The number of images of the domain.
    """
    halves = slice(len(index) // 2), slice(len(index) // 2, None)
    counts = [np.bincount(index[half], what[half], images) for half in halves for what in (np.ones_like(right), right)]
    return base64.b64encode(zlib.compress(np.stack(counts).astype("<u2").tobytes(), 9)).decode()


def unpack_counts(text: str) -> Counts:
    """Return the counts that `pack_counts` encoded."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u2").reshape(2, 2, -1)


def paired_difference(pairs: Sequence[tuple[Counts, Counts]]) -> Difference:
    """Return the mean difference of accuracy between the first and the second of each pair, with its interval.

    Args:
        pairs: The counts of two methods on one domain in one order, for each domain and order.
    """
    points, effects = 0.0, np.zeros(max(mine.shape[-1] for mine, _ in pairs))
    for mine, theirs in pairs:
        for sign, counts in ((1, mine), (-1, theirs)):
            met, right = counts.sum(0, dtype=float)
            accuracy = right.sum() / met.sum()
            points += sign * accuracy / len(pairs)
            effects[: len(met)] += sign * (right - accuracy * met) / met.sum() / len(pairs)
    images = np.count_nonzero(sum(np.pad(mine.sum((0, 1)), (0, len(effects) - mine.shape[-1])) for mine, _ in pairs))
    # plus the variance of one image, as in Agresti and Min (2005), because few differing predictions prove little
    variance = np.square(effects).sum() * images / max(1, images - 1) + 1 / images**2
    return Difference(100 * float(points), 100 * NORMAL_95 * math.sqrt(variance))
