"""The cost of a step of a method, relative to forward passes of the same model in the same process."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.adapt import adapt
from ..core.statistics import SourceStatistics
from .memory import peak_memory

ENOUGH = 20.0  # seconds of timed steps after which no further round begins


@dataclass(frozen=True)
class Cost:
    """The cost of one step of a method. Times are ratios, because only these can be compared between machines."""

    ratio: float  # of the time of a step to that of a forward pass of the batch: median over the rounds
    least: float  # lowest ratio of all rounds
    most: float
    rounds: int  # a single round is unreliable if other load varies during a long step
    seconds: float  # of a step: median over the rounds
    forward: float  # samples passed forward, per sample of the batch
    backward: float
    peak_mib: float | None  # memory of the first step, in addition to what was in use before


def measure(
    model: nn.Module,
    method: str,
    batches: Sequence[Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    source_statistics: SourceStatistics | None = None,
    seed: int = 0,
    **how: Any,
) -> Cost:
    """Time the steps of a method on a copy of the model, without a guard.

    Each step is between two forward passes of the plain model, so that other load on the machine slows both.

    Args:
        model: The plain model. It is not changed.
        method: The name of the method.
        batches: The first batch is not timed, because it builds the optimizer and fills caches. Each further batch is one
            round; there must be at least one.
        options: The options of the method.
        source_statistics: The source statistics, for a method that needs some.
        seed: The seed of all random numbers of the method.
        **how: Further options of `acclimate.adapt`.
    """
    how = {"guard": None, **how, **(options or {})}
    adapter = adapt(copy.deepcopy(model), method, source_statistics=source_statistics, seed=seed, **how)
    # Not in a timed round, because measuring memory releases free memory, and allocating it again takes time.
    with peak_memory(batches[0].device) as peak:
        adapter(batches[0])
    passes = adapter.engine.passes
    before = (passes.forward, passes.backward)
    ratios: list[float] = []
    seconds: list[float] = []
    count = 0
    for images in batches[1:]:
        around = [time_forward(model, images)]
        start = time.perf_counter()
        adapter(images).cpu()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
        around.append(time_forward(model, images))
        ratios.append(seconds[-1] / statistics.fmean(around))
        count += len(images)
        if sum(seconds) > ENOUGH:
            break
    return Cost(
        ratio=statistics.median(ratios),
        least=min(ratios),
        most=max(ratios),
        rounds=len(ratios),
        seconds=statistics.median(seconds),
        forward=(passes.forward - before[0]) / count,
        backward=(passes.backward - before[1]) / count,
        peak_mib=peak.mib,
    )


@torch.inference_mode()
def time_forward(model: nn.Module, images: Tensor) -> float:
    """Return the seconds of one forward pass of the whole batch."""
    start = time.perf_counter()
    out = model(images)
    getattr(out, "logits", out).cpu()
    return time.perf_counter() - start
