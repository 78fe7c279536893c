"""Variants of a method, each run by the bench on the same images under each corruption, and compared image by image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.domains import Domain
from ..data.streams import Stream
from ..errors import ConfigError
from ..evaluation.bench import bench
from ..evaluation.grid import Execution
from ..evaluation.journal import steps_of
from ..evaluation.spec import Protocol
from ..evaluation.store import Outcome
from ..models.families import view_of
from .intervals import Adaptation, Interval, paired
from .subject import BATCH, Subject

Variants = Mapping[str, tuple[str, Mapping[str, Any]]]  # what it is called, method, options

HOW_RUN = (
    "Nothing watches for collapse (the guard is off, as in the paper's code), and each run starts from the source model. "
    "Accuracy is that of predictions made before the update by the batch that they are for."
)


@dataclass(frozen=True)
class Scored:
    """The runs of a variant, one for each corruption, and which images were right."""

    outcomes: list[Outcome]
    right: npt.NDArray[np.bool_]  # (corruptions, images): the images are the same, in the same order, in all variants
    adaptation: Adaptation  # of the run that went least far

    @property
    def accuracies(self) -> list[float]:
        """Return the top-1 accuracy under each corruption, in per cent."""
        return (100 * self.right.mean(1)).tolist()

    @property
    def mean(self) -> float:
        """Return the mean of these."""
        return 100 * float(self.right.mean())

    @property
    def images(self) -> int:
        """Return the number of images."""
        return self.right.shape[1]

    def over(self, other: Scored) -> Interval:
        """Return the mean gain over another variant, in points, with an interval over images."""
        return paired(100 * (self.right.mean(0) - other.right.mean(0)))


def run_variants(
    subject: Subject, corruptions: Sequence[str], variants: Variants, *, severity: int, seed: int
) -> dict[str, Scored]:
    """Run every variant on every corruption, each from the source model. Variants that are the same run are run once."""
    require_labels(subject)
    methods: list[tuple[str, Mapping[str, Any]]] = []
    position = {}
    for name, (method, options) in variants.items():
        if (method, options) not in methods:
            methods.append((method, options))
        position[name] = methods.index((method, options))
    domains = [subject.domain(name, severity) for name in corruptions]
    with TemporaryDirectory() if subject.runs is None else nullcontext(str(subject.runs)) as folder:
        results = bench(
            subject.model,
            replace(subject.data, domains=domains),
            methods=methods,
            seeds=[seed],
            batch_size=BATCH,
            protocol=Protocol(guard=False),
            source_statistics=subject.testbed.statistics,
            model_name=subject.testbed.name,
            execution=Execution(device=str(subject.device)),
            out=folder,
            console=subject.console,
        )
        # one domain after another, each with all methods
        runs = [_run(outcome, domains[i // len(methods)], seed) for i, outcome in enumerate(results)]
    scored = {}
    for name, at in position.items():
        right, adaptations = zip(*runs[at :: len(methods)])
        scored[name] = Scored(list(results[at :: len(methods)]), np.stack(right), min(adaptations))
    return scored


def _run(outcome: Outcome, domain: Domain, seed: int) -> tuple[npt.NDArray[np.bool_], Adaptation]:
    """Return which images were predicted right in a run, in the order of the domain, and how far the run went."""
    assert outcome.folder is not None
    steps = steps_of(outcome.folder, outcome.spec.id)
    stream = Stream(domain, batch_size=BATCH, seed=seed)
    assert stream.digest == outcome.spec.order
    right = np.empty(stream.samples, dtype=bool)
    right[stream.order] = right_in(steps)
    return right, Adaptation(len(steps), steps[-1]["drift"] or 0.0)


def right_in(steps: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.bool_]:
    """Return which images were predicted right in the steps of a run, in the order of the stream."""
    return np.array(list("".join(line["top"] for line in steps))) == "2"


def require_labels(subject: Subject) -> None:
    """Refuse images of which it is not known what the model should say."""
    data, head = subject.data, view_of(subject.model).classes
    if data.classes is None and data.num_classes != head:
        found = f"are in {data.num_classes} folders" if subject.labelled else "have no classes"
        raise ConfigError(
            f"Accuracy cannot be measured: the images {found}, and the model has {head} classes. Give a folder with one "
            f"sub-folder for each of the {head}, which sorted by name are in the order of the model's classes, or another "
            "data set (`acclimate data list`)."
        )


def protocol_of(scored: Scored, **more: str) -> dict[str, str]:
    """Return how the runs were made, name by name."""
    spec = scored.outcomes[0].spec
    where = ", ".join(str(key) for outcome in scored.outcomes for key in outcome.spec.domains)
    return {**spec.shared, "corruptions": where, "images": f"{scored.images} of each", "seed": str(spec.seed), **more}


def recoveries(outcomes: Sequence[Outcome]) -> int:
    """Return how often a method went back to the source model."""
    return sum(event == "recovered" for outcome in outcomes for _, event in outcome.result.events)


def worded_options(options: Mapping[str, Any]) -> str:
    """Return options in words."""
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "the defaults"


def rows_of(variants: Variants, scored: Mapping[str, Scored]) -> Iterator[dict[str, Any]]:
    """Return the numbers behind a figure, one row for each variant and corruption."""
    for name, (method, options) in variants.items():
        for outcome, accuracy in zip(scored[name].outcomes, scored[name].accuracies):
            result = outcome.result
            yield {
                "variant": name,
                "method": method,
                "options": worded_options(options),
                "domain": str(outcome.spec.domains[0]),
                "accuracy": accuracy,
                "learned_from": 100 * result.used / result.samples,
                "recoveries": recoveries([outcome]),
                "run": outcome.spec.id,
            }
