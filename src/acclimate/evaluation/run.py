"""One run: an adapter meets a stream."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ..core.adapter import Adapter, Record
from ..core.digests import digest_json
from ..data.domains import DomainKey
from ..data.streams import Stream
from .journal import Journal
from .memory import peak_memory
from .scores import Floats, Scores

MEASURED = {"seconds", "peak_mib"}  # differ from one time to the next; all else does not
PACKED = {"by_image"}  # covered by the digest of the predictions


@dataclass(frozen=True)
class Result:
    """What came out of a run. Accuracies are shares of one."""

    samples: int
    top1: float
    top5: float
    second_half: float  # mean over domains of the top-1 over the second half of each
    mean: float  # of the domains' top-1
    per_domain: dict[DomainKey, float]
    ece: float
    nll: float
    seconds: float  # in the adapter; loading is not counted
    peak_mib: float | None  # beyond what the process held before; of a resumed run, since it was resumed
    forward: int  # samples passed forward, and backward; which rejected ones are spared depends on the micro-batches
    backward: int
    used: int  # samples learned from
    events: list[tuple[int, str]]  # step, what the method or the guard did
    curve: list[tuple[int, float]]  # images so far, top-1 so far
    predictions: str  # digest of every image's score, in the stream's order
    by_image: dict[DomainKey, str] = field(default_factory=dict)  # how often each was met and right: `paired.unpack_counts`

    @property
    def digest(self) -> str:
        """SHA-256 of all that is not a measurement of the machine: equal for equal runs, interrupted or not."""
        values = {name: value for name, value in self.to_json().items() if name not in MEASURED | PACKED}
        return digest_json(values)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON holds it, which has no infinity and no keys but text."""
        keyed = {name: [[*key, v] for key, v in getattr(self, name).items()] for name in ("per_domain", "by_image")}
        return asdict(self) | {"nll": self.nll if math.isfinite(self.nll) else None, **keyed}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Result:
        """Return a result as it was written to a file."""
        pairs = {name: [tuple(pair) for pair in values[name]] for name in ("events", "curve")}
        keyed = {name: {DomainKey(*key): v for *key, v in values[name]} for name in ("per_domain", "by_image")}
        nll = math.inf if values["nll"] is None else values["nll"]
        return cls(**{**values, **pairs, **keyed, "nll": nll})


@dataclass
class Tally:
    """Sums over the steps of a run."""

    used: int = 0
    forward: int = 0
    backward: int = 0
    seconds: float = 0.0
    events: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        for name in ("used", "forward", "backward", "seconds"):
            setattr(self, name, getattr(self, name) + line[name])
        if line["event"]:
            self.events.append((line["step"], line["event"]))


def run(
    adapter: Adapter,
    stream: Stream,
    on_step: Callable[[Scores, Record], None] = lambda scores, record: None,
    journal: Journal | None = None,
    *,
    unknown: int | None = None,
) -> Result:
    """Predict and adapt, batch by batch, and score the predictions.

    Args:
        adapter: Fresh from `acclimate.adapt`.
        stream: What it meets.
        on_step: Called after every batch with the scores so far and what the adapter did.
        journal: Where every step is written down. If it holds the beginning of this run, the run goes on from there.
        unknown: See `Scores`.
    """
    engine = adapter.engine
    scores = Scores(engine.num_classes, [domain.key for domain in stream.domains], unknown=unknown)
    tally = Tally()
    done = 0
    for line in journal.resume(adapter) if journal else ():
        scores.extend(_rows(line))
        tally.add(line)
        done += 1
    with peak_memory(engine.vit.device) as peak:
        for images, labels, domain in stream.since(done):
            images = images.to(engine.vit.device, non_blocking=True)
            before, start = replace(engine.passes), time.perf_counter()
            logits = adapter(images).cpu()  # waits for a GPU too
            seconds = time.perf_counter() - start
            scores.add(logits, labels, domain)
            record = adapter.record
            assert record is not None
            line = _line(scores, record) | {
                "seconds": seconds,
                "forward": engine.passes.forward - before.forward,
                "backward": engine.passes.backward - before.backward,
            }
            tally.add(line)
            if journal:
                journal.note(line, adapter)
            on_step(scores, record)
    where, accuracy = scores.running()
    return Result(
        samples=scores.count,
        top1=scores.top1,
        top5=scores.top5,
        second_half=scores.second_half,
        mean=scores.mean,
        per_domain=scores.per_domain,
        ece=scores.ece,
        nll=scores.nll,
        peak_mib=peak.mib,
        curve=list(zip(where.tolist(), accuracy.tolist())),
        predictions=scores.digest,
        by_image=scores.by_image(stream.order, [len(domain.labels) for domain in stream.domains]),
        **asdict(tally) | {"events": tally.events},
    )


def _line(scores: Scores, record: Record) -> dict[str, Any]:
    """A step as its record on disk: first the sums that tell how the run is going, then the batch image by image."""
    right, five, confidence, nll, domain = scores.last
    domains = domain.astype(int).tolist()
    return {
        "step": record.step,
        "images": scores.count,
        "right": scores.right,
        **{name: _finite(getattr(record, name)) for name in ("entropy", "used", "loss", "recovery", "drift")},
        "event": record.event,
        "top": "".join(map(str, (right + five).astype(int))),  # 2: right, 1: among the five likeliest, 0: wrong
        "confidence": confidence.tolist(),
        "nll": [value if math.isfinite(value) else str(value) for value in nll.tolist()],
        "domain": domains if len(set(domains)) > 1 else domains[0],
    }


def _rows(line: dict[str, Any]) -> Floats:
    """The batch of a record, as `Scores.last` gave it."""
    top = np.array([int(digit) for digit in line["top"]])
    nll = [float(value) for value in line["nll"]]
    return np.stack([top == 2, top >= 1, line["confidence"], nll, np.broadcast_to(line["domain"], top.shape)]).astype(float)


def _finite(value: float | None) -> float | None:
    """JSON knows no NaN and no infinity."""
    return value if value is None or math.isfinite(value) else None
