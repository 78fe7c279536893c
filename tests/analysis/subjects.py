"""Subjects of random images for the tiny models of the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from acclimate.analysis.subject import Subject, predicted
from acclimate.data.catalog import Data
from acclimate.data.domains import Corrupted, Domain, DomainKey, Images
from acclimate.evaluation.testbed import Testbed
from acclimate.testing.check import SIZES, tiny_model

HALF = (0.5, 0.5, 0.5)


def tiny_subject(
    count: int = 6,
    family: str = "timm",
    *,
    labels: Sequence[int] | None = None,
    classes: Sequence[str] = (),
    severity: int = 2,
    constants: str = "imagenet-c",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    **more: Any,
) -> Subject:
    """Return a tiny model and random images, all of one label unless others are given."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, SIZES.image, SIZES.image, 3), dtype=np.uint8)
    given = np.zeros(count, np.int64) if labels is None else np.asarray(labels, np.int64)
    images = Images(pixels, given, np.arange(count))

    def opened(key: DomainKey) -> Domain:
        return Corrupted(images, *key, mean=HALF, std=HALF, constants=constants)

    data = Data("tiny", [opened(DomainKey("clean"))], classes, opener=opened, severity=severity)
    return Subject(Testbed(tiny_model(family), "tiny", data, lambda size: options or {}), **more)


def labelled_subject(count: int = 24, classes: Sequence[str] | None = None, **more: Any) -> Subject:
    """Return a subject whose labels are what the model predicts under brightness of severity 1."""
    names = tuple(map(str, range(SIZES.classes))) if classes is None else classes
    how: dict[str, Any] = {"severity": 1, "constants": "cifar-10-c"}
    plain = tiny_subject(count, **how)
    labels = predicted(plain.model, plain.batch("brightness"))
    return tiny_subject(count, labels=labels.tolist(), classes=names, **how, **more)
