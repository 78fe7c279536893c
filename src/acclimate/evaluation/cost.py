"""What a step of a method costs, beside plain forward passes of the same model in the same run."""

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

ENOUGH = 20.0  # seconds of timed steps after which a slow method is not repeated any more


@dataclass(frozen=True)
class Cost:
    """One step of a method. Times are ratios, because only these can be compared between machines."""

    ratio: float  # to a plain forward pass of the same batch, the median over the rounds
    least: float  # of the rounds
    most: float
    rounds: int  # one alone says little: two plain passes do not tell how busy the machine was during a long step
    seconds: float  # of a step, the median
    forward: float  # samples that the engine passed forward, for each sample of the batch
    backward: float
    peak_mib: float | None  # of the first step, beyond what the process held before it


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
    """Time a method's steps on a copy of the model, each between two plain passes, so that a busy machine slows both.

    Args:
        model: The plain model. It is passed and not changed.
        method: Its name.
        batches: The first is not timed: it builds the optimizer and fills caches. Then one for each round, at least one.
        options: The method's.
        source_statistics: See `acclimate.adapt`.
        seed: See `acclimate.adapt`.
        **how: Further options of `acclimate.adapt`.
    """
    adapter = adapt(copy.deepcopy(model), method, source_statistics=source_statistics, seed=seed, **how, **(options or {}))
    # apart from the rounds: to measure memory, that of the process is given back, and to get it again takes a step time
    with peak_memory(batches[0].device) as peak:
        adapter(batches[0])
    passes = adapter.engine.passes
    before = (passes.forward, passes.backward)
    ratios: list[float] = []
    seconds: list[float] = []
    count = 0
    for images in batches[1:]:
        around = [plain(model, images)]
        start = time.perf_counter()
        adapter(images).cpu()  # waits for a GPU too
        seconds.append(time.perf_counter() - start)
        around.append(plain(model, images))
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
def plain(model: nn.Module, images: Tensor) -> float:
    """Seconds of one forward pass of the whole batch."""
    start = time.perf_counter()
    out = model(images)
    getattr(out, "logits", out).cpu()
    return time.perf_counter() - start
