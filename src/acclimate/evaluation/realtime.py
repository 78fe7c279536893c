"""Accuracy under real time: images arrive at a rate, whether a method is ready or not.

A batch arrives when its last image does. A method that is free predicts it and learns from it. One that is still busy with
the batch before is late: it only predicts. If it is still busy when the next batch arrives as well, the images are lost,
which counts as wrong.

Nothing waits in fact: the durations of calls are measured, and a clock adds them up. So the results depend on this machine
and on its load, and are printed rather than kept among the runs, which can be repeated to the last bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.adapter import Adapter
from ..data.streams import Stream
from .testbed import Testbed


@dataclass(frozen=True)
class Timed:
    """The accuracies of a method without and under real time, and what happened to the images; all are shares."""

    method: str
    offline: float
    accuracy: float  # of all images, of which a lost one counts as wrong
    learned: float  # images of batches that the method learned from
    lost: float


class Clock:
    """The time of one method: when each batch arrives, and when the method is free.

    Args:
        rate: Images per second. With infinity, the method is always waited for.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free = self.arrival = 0.0

    def next(self, count: int) -> str:
        """Let a batch arrive, and return what happens to it: "learn", "predict" or "lose"."""
        if math.isinf(self.rate):
            return "learn"
        self.arrival += count / self.rate
        late = self.free - self.arrival
        return "learn" if late <= 0 else "predict" if late < count / self.rate else "lose"

    def spend(self, seconds: float) -> None:
        """Let the method be busy for a time, from now on or, if it is late, after what it does."""
        self.free = max(self.free, self.arrival) + seconds


def pass_by(
    adapter: Adapter, batches: Iterable[tuple[Tensor, Tensor]], rate: float, now: Callable[[], float] = time.perf_counter
) -> tuple[float, float, float]:
    """Return the accuracy on batches of images and labels, and the shares that were learned from and lost."""
    clock, right, learned, lost, total = Clock(rate), 0, 0, 0, 0
    for images, labels in batches:
        fate = clock.next(len(images))
        total += len(images)
        if fate == "lose":
            lost += len(images)
            continue
        start = now()
        if fate == "learn":
            logits = adapter(images).cpu()
            learned += len(images)
        else:
            with adapter.frozen():
                logits = adapter(images).cpu()
        clock.spend(now() - start)
        right += int((logits.argmax(-1) == labels).sum())
    return right / total, learned / total, lost / total


def compare(
    testbed: Testbed,
    methods: Sequence[tuple[str, Mapping[str, Any]]],
    streams: Sequence[Stream],
    rate: float,
    *,
    seed: int = 0,
    now: Callable[[], float] = time.perf_counter,
) -> list[Timed]:
    """Return the means over streams of methods without and under real time, by the clock `now`."""
    found = []
    for method, options in methods:
        rows = []
        for stream in streams:
            adapters = [testbed.adapted(method, seed=seed, batch_size=stream.batch_size, **options) for _ in range(2)]
            device = adapters[0].engine.view.device
            results = []
            for adapter, speed in zip(adapters, (math.inf, rate)):
                batches = ((images.to(device), labels) for images, labels, _ in stream.since(0))
                results.append(pass_by(adapter, batches, speed, now))
            (offline, *_), timed = results
            rows.append((offline, *timed))
        name = ":".join([method, *(f"{option}={value}" for option, value in options.items())])
        found.append(Timed(name, *(sum(column) / len(rows) for column in zip(*rows))))
    return found
