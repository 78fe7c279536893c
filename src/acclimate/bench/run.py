"""One run: an adapter meets a stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..adapter import Adapter
from ..data.datasets import title
from ..data.streams import Stream
from .memory import peak_memory
from .scores import Scores


@dataclass(frozen=True)
class Result:
    """What came out of a run. Accuracies are shares of one."""

    samples: int
    top1: float
    top5: float
    late: float  # mean over domains of the top-1 over the second half of each
    mean: float  # of the domains' top-1
    per_domain: dict[str, float]
    ece: float
    nll: float
    seconds: float  # in the adapter; loading is not counted
    peak_mib: float | None  # beyond what the process held before
    forward: int  # samples passed forward, and backward; which rejected ones are spared depends on the micro-batches
    backward: int
    used: int  # samples learned from
    events: list[tuple[int, str]]  # step, what the method or the guard did
    curve: list[tuple[int, float]]  # images so far, top-1 so far


def run(adapter: Adapter, stream: Stream, on_batch: Callable[[Scores], None] = lambda scores: None) -> Result:
    """Predict and adapt, batch by batch, and score the predictions.

    Args:
        adapter: Fresh from `acclimate.adapt`.
        stream: What it meets.
        on_batch: Called after every batch with the scores so far.
    """
    engine = adapter.engine
    scores = Scores(engine.num_classes, [title(domain) for domain in stream.domains])
    seconds, used, events = 0.0, 0, []
    before = replace(engine.passes)
    with peak_memory(engine.vit.device) as peak:
        for images, labels, domain in stream:
            images = images.to(engine.vit.device, non_blocking=True)
            start = time.perf_counter()
            logits = adapter(images).cpu()  # waits for a GPU too
            seconds += time.perf_counter() - start
            scores.add(logits, labels, domain)
            record = adapter.record
            assert record is not None
            used += record.used
            if record.event:
                events.append((record.step, record.event))
            on_batch(scores)
    where, accuracy = scores.running()
    return Result(
        samples=scores.count,
        top1=scores.top1,
        top5=scores.top5,
        late=scores.late,
        mean=scores.mean,
        per_domain=scores.per_domain,
        ece=scores.ece,
        nll=scores.nll,
        seconds=seconds,
        peak_mib=peak.mib,
        forward=engine.passes.forward - before.forward,
        backward=engine.passes.backward - before.backward,
        used=used,
        events=events,
        curve=list(zip(where.tolist(), accuracy.tolist())),
    )
