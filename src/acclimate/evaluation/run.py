"""One run: an adapter predicts a stream and adapts to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..core.adapter import Adapter, Record
from ..core.digests import digest_json
from ..core.processes import finishing_steps
from ..data.domains import DomainKey
from ..data.streams import Stream
from ..errors import StateError
from .journal import Journal
from .memory import peak_memory
from .scores import Floats, Scores

MEASURED = {"seconds", "peak_mib"}  # measurements, which differ between equal runs
PACKED = {"by_image"}  # not in the digest, because `predictions` covers it


@dataclass(frozen=True)
class Result:
    """The result of a run. Accuracies are from 0 to 1."""

    samples: int
    top1: float
    top5: float
    second_half: float  # mean over domains of the top-1 on the second half of each
    mean: float  # of the top-1 of all domains
    per_domain: dict[DomainKey, float]
    ece: float
    nll: float
    seconds: float  # in the adapter, without loading
    peak_mib: float | None  # in addition to memory in use before; after a resume, of the rest of the run
    forward: int  # samples passed forward; as `backward`, it depends on the micro-batches
    backward: int
    used: int  # samples that the method learned from
    events: list[tuple[int, str]]  # step, and the event of the method or the guard
    curve: list[tuple[int, float]]  # number of images so far, and top-1 so far
    predictions: str  # digest of the scores of all images, in the order of the stream
    by_image: dict[DomainKey, str] = field(default_factory=dict)  # counts, for `paired.unpack_counts`
    estimated_accuracy: float | None = None  # without labels, mean over the stream; None without a guard
    estimated_harm: float | None = None  # estimated accuracy of the unadapted model minus that of the adapted one

    @property
    def digest(self) -> str:
        """The SHA-256 of everything that is not measured. Equal runs have equal digests, interrupted or not."""
        values = {name: value for name, value in self.to_json().items() if name not in MEASURED | PACKED}
        return digest_json(values)

    def to_json(self) -> dict[str, Any]:
        """Return the result as values for JSON, which has no infinity and only text as keys."""
        keyed = {name: [[*key, v] for key, v in getattr(self, name).items()] for name in ("per_domain", "by_image")}
        return asdict(self) | {"nll": self.nll if math.isfinite(self.nll) else None, **keyed}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Result:
        """Return a result from the values of a JSON file."""
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
    estimates: list[tuple[int, float, float]] = field(default_factory=list)  # images, accuracy and harm of a step

    def add(self, line: dict[str, Any]) -> None:
        """Add the record of a step."""
        if line["estimated_accuracy"] is not None:
            self.estimates.append((len(line["top"]), line["estimated_accuracy"], line["harm"]))
        for name in ("used", "forward", "backward", "seconds"):
            setattr(self, name, getattr(self, name) + line[name])
        if line["event"]:
            self.events.append((line["step"], line["event"]))

    def estimated(self) -> dict[str, float | None]:
        """Return the means of the estimates over the images of the stream."""
        images, *estimates = zip(*self.estimates) if self.estimates else ((), (), ())
        names = ("estimated_accuracy", "estimated_harm")
        return {name: float(np.average(e, weights=images)) if e else None for name, e in zip(names, estimates)}


def run(
    adapter: Adapter,
    stream: Stream,
    on_step: Callable[[Scores, Record], None] = lambda scores, record: None,
    journal: Journal | None = None,
    *,
    unknown: int | None = None,
) -> Result:
    """Predict a stream and adapt to it, batch by batch, and score the predictions.

    Args:
        adapter: A new adapter from `acclimate.adapt`.
        stream: The stream.
        on_step: A function that is called after every batch, with the scores so far and the record of the step.
        journal: A journal in which every step is recorded. If it contains the beginning of this run, the run continues from
            there.
        unknown: The label of images of no class, for which any prediction is wrong; None if there are none.
    """
    engine = adapter.engine
    scores = Scores(engine.num_classes, [domain.key for domain in stream.domains], unknown=unknown)
    tally = Tally()
    done = 0
    for line in journal.resume(adapter) if journal else ():
        scores.extend(_rows(line))
        tally.add(line)
        done += 1
    with peak_memory(engine.view.device) as peak, finishing_steps() as ending:
        for images, labels, domain in stream.since(done):
            images = images.to(engine.view.device, non_blocking=True)
            (forward, backward), start = (engine.passes.forward, engine.passes.backward), time.perf_counter()
            logits = adapter(images).cpu()  # waits for the GPU
            seconds = time.perf_counter() - start
            scores.add(logits, labels, domain)
            record = adapter.record
            assert record is not None
            line = _line(scores, record) | {
                "seconds": seconds,
                "forward": engine.passes.forward - forward,
                "backward": engine.passes.backward - backward,
            }
            tally.add(line)
            end = ending()
            if journal:
                try:
                    journal.record(line, adapter, save=end)
                except OSError as error:
                    raise StateError(f"Cannot write {journal.folder}: {error.strerror}.") from error
            on_step(scores, record)
            if end:
                raise KeyboardInterrupt
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
        used=tally.used,
        forward=tally.forward,
        backward=tally.backward,
        seconds=tally.seconds,
        events=tally.events,
        **tally.estimated(),
    )


def _line(scores: Scores, record: Record) -> dict[str, Any]:
    """Return the record of a step for the journal: sums over the run first, and then the scores of each image."""
    right, five, confidence, nll, domain = scores.last
    domains = domain.astype(int).tolist()
    return {
        "step": record.step,
        "images": scores.count,
        "right": scores.right,
        **{name: _finite(getattr(record, name)) for name in ("entropy", "used", "loss", "recovery", "drift")},
        "event": record.event,
        "estimated_accuracy": record.estimated_accuracy,
        "harm": None if record.harm is None else record.harm.estimate,
        "top": "".join(map(str, (right + five).astype(int))),  # 2: top-1, 1: among the top 5, 0: neither
        "confidence": confidence.tolist(),
        "nll": [value if math.isfinite(value) else str(value) for value in nll.tolist()],
        "domain": domains if len(set(domains)) > 1 else domains[0],
    }


def _rows(line: dict[str, Any]) -> Floats:
    """Return the scores of a batch from its record, in the form of `Scores.last`."""
    top = np.array([int(digit) for digit in line["top"]])
    nll = [float(value) for value in line["nll"]]
    return np.stack([top == 2, top >= 1, line["confidence"], nll, np.broadcast_to(line["domain"], top.shape)]).astype(float)


def _finite(value: float | None) -> float | None:
    """Return a value, or None if JSON cannot represent it."""
    return value if value is None or math.isfinite(value) else None
