"""Intervals of paired differences over images, and what may be concluded from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.adapter import Adapter

Floats = npt.NDArray[np.float64]
LEVEL = 0.95
LEAST_IMAGES = 10  # with fewer, nothing is concluded
LEAST_STEPS = 4
LEAST_DRIFT = 1e-5  # float32 rounds at 1e-7
RESAMPLES = 2000
TOO_FEW = "cannot be judged here: too few images or steps to say"


class Interval(NamedTuple):
    """A mean over images with its 95 % interval."""

    mean: float
    low: float
    high: float
    images: int

    @property
    def excludes_zero(self) -> bool:
        """Return whether the sign of the mean is certain at this level, and the images are enough to say so."""
        return self.images >= LEAST_IMAGES and (self.low > 0 or self.high < 0)

    def text(self, unit: str, digits: int = 2, scale: float = 1) -> str:
        """Return the numbers in words: `+0.30 px (95 % interval +0.20 to +0.40)`."""
        mean, low, high = (f"{round(scale * value, digits) + 0.0:+.{digits}f}" for value in self[:3])
        told = f"95 % interval {low} to {high}" if math.isfinite(self.low) else "no interval: one image"
        return f"{mean}{unit and ' '}{unit} ({told})"


def paired(differences: Any) -> Interval:
    """Return the mean of differences, one for each image, with the interval of Student's t."""
    from scipy.stats import t

    each = np.asarray(differences, dtype=np.float64)
    mean, count = float(each.mean()), len(each)
    if count < 2:
        return Interval(mean, -math.inf, math.inf, count)
    half = float(t.ppf((1 + LEVEL) / 2, count - 1) * each.std(ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half, count)


def bootstrap(statistic: Callable[[Floats], Floats], count: int) -> Interval:
    """Return a statistic of some images with its percentile interval over resampled images.

    Args:
        statistic: Takes weights of the images, (resamples, images), whose rows sum to 1, and returns a value for each row.
        count: The number of images.
    """
    value = float(statistic(np.full((1, count), 1 / count))[0])
    if count < 2:
        return Interval(value, -math.inf, math.inf, count)
    drawn = np.random.RandomState(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    low, high = np.quantile(statistic(drawn / count), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high), count)


class Adaptation(NamedTuple):
    """How far an adaptation went: its steps, and the distance of what adapts from the source, relative to its length."""

    steps: int
    drift: float

    @classmethod
    def of(cls, adapter: Adapter) -> Adaptation:
        """Return how far an adapter is from its source model."""
        return cls(int(adapter.steps), adapter.engine.adapted.drift())

    def __str__(self) -> str:
        return f"{self.steps} step{'s' if self.steps != 1 else ''} moved what adapts by {100 * self.drift:.2g} %"


def enough(interval: Interval, adaptation: Adaptation | None = None) -> bool:
    """Return whether there are images and steps enough for a verdict."""
    return interval.images >= LEAST_IMAGES and (adaptation is None or adaptation.steps >= LEAST_STEPS)


def seen(interval: Interval, adaptation: Adaptation | None = None) -> bool:
    """Return whether a difference is certain, and an adaptation that is to explain it did something."""
    moved = adaptation is None or adaptation.drift > LEAST_DRIFT
    return enough(interval, adaptation) and interval.excludes_zero and moved


def verdict(interval: Interval, adaptation: Adaptation | None = None) -> str:
    """Return whether the claim that a difference is above zero holds, in words that follow the claim."""
    if not enough(interval, adaptation):
        return TOO_FEW
    return "holds here" if seen(interval, adaptation) and interval.mean > 0 else "is not seen here"
