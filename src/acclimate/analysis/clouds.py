"""Clouds of points: every image in every domain, as the source model and its adapted copies see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..data.corruptions import Integers
from ..models.families import view_of
from .embedding import (
    Array,
    Embedding,
    Separability,
    conditioned_blocks,
    embed,
    frequent,
    joined,
    separability,
    standardised,
)
from .intervals import Adaptation, Floats
from .subject import Subject, worded

SHOWN = 200  # images in every domain at most
PERPLEXITY = 30
SOURCE, EACH, ONE = MODELS = ("source", "each", "one")  # not adapted; one model for each domain; one model for all domains
Measured = dict[tuple[str, int, str], Separability]  # by model, layer, and "domain" or "class"


@dataclass(frozen=True)
class Cloud:
    """Every image in every domain, seen by every model: one row each, domain by domain."""

    domains: list[str]
    domain: Integers  # of every row, a number in `domains`
    image: Integers
    label: Integers
    measurable: npt.NDArray[np.bool_] | None  # rows whose class has images enough for a probe; None: too few classes have
    embeddings: Mapping[str, Embedding]  # by model
    block: int | None  # whose conditioners were kept
    method: str  # with its options
    adaptations: Mapping[str, Adaptation]  # by model; of the models of single domains, the shortest

    @property
    def depth(self) -> int:
        """Return the number of layers."""
        return max(self.embeddings[SOURCE].class_tokens)

    @property
    def images(self) -> int:
        """Return the number of images in each domain."""
        return len(self.domain) // len(self.domains)

    @property
    def perplexity(self) -> float:
        """Return the perplexity of a map of this cloud."""
        return perplexity(len(self.domain))


def gather(subject: Subject, corruptions: Sequence[str], method: str, *, severity: int, seed: int = 0) -> Cloud:
    """Adapt to each domain from the source, and to all of them in a row, and keep what the class tokens became."""
    domains = [subject.domain(name, severity) for name in corruptions]
    layers = range(1, len(view_of(subject.model).blocks) + 1)
    one = subject.adapted(method, domains, seed=seed)
    # the first block's class token is the same for every image, and so are its conditioners
    block = next((number for number in conditioned_blocks(one) if number), None)
    blocks = [] if block is None else [block]
    # as many as are shown, from all over the domain: images may be sorted by class
    chosen = np.unique(np.linspace(0, subject.count - 1, min(SHOWN, subject.count)).round().astype(np.int64))
    kept: dict[str, list[Embedding]] = {name: [] for name in MODELS}
    separate: list[Adaptation] = []
    for domain in domains:
        images = domain.load(chosen).to(subject.device)
        adapter = subject.adapted(method, [domain], seed=seed)
        separate.append(Adaptation.of(adapter))
        kept[SOURCE].append(embed(subject.model, images, layers=layers))
        kept[EACH].append(embed(adapter, images, layers=layers, blocks=blocks))
        kept[ONE].append(embed(one, images, layers=layers, blocks=blocks))
    label, image = np.concatenate([domain.labels[chosen] for domain in domains]), np.tile(chosen, len(domains))
    measurable = frequent(label, image)
    return Cloud(
        domains=list(corruptions),
        domain=np.repeat(np.arange(len(domains)), len(chosen)),
        image=image,
        label=label,
        measurable=measurable if subject.labelled and len(np.unique(label[measurable])) > 1 else None,
        embeddings={name: joined(each) for name, each in kept.items()},
        block=block,
        method=worded(one),
        adaptations={EACH: min(separate), ONE: Adaptation.of(one)},
    )


def measure(subject: Subject, cloud: Cloud, *, seed: int = 0) -> Measured:
    """Return how well the class tokens of every model and layer tell domains apart, and classes, if there are any."""
    found: Measured = {}
    work = [(model, layer) for model in cloud.embeddings for layer in range(1, cloud.depth + 1)]
    for model, layer in subject.track(work, "probes"):
        points, rows = cloud.embeddings[model].class_tokens[layer], cloud.measurable
        found[model, layer, "domain"] = separability(points, cloud.domain, cloud.image, seed=seed)
        if rows is not None:
            found[model, layer, "class"] = separability(points[rows], cloud.label[rows], cloud.image[rows], seed=seed)
    return found


def chosen_layers(depth: int) -> list[int]:
    """Return the paper's layers 1, 3, 6, 11 and 12 of 12, or those at the same share of the depth."""
    return sorted({max(1, round(layer * depth / 12)) for layer in (1, 3, 6, 11, 12)})


def plane(points: Array, *, seed: int = 0) -> Floats:
    """Return a t-SNE map: places, (count, 2), where near points stay near; distances and sizes of groups mean little."""
    from sklearn.manifold import TSNE

    even = standardised(points)
    if not even.any():
        return np.zeros((len(points), 2))  # all are the same point
    return TSNE(perplexity=perplexity(len(points)), init="pca", random_state=seed).fit_transform(even).astype(np.float64)


def perplexity(count: int) -> float:
    """Return the usual perplexity, or less for few points."""
    return min(PERPLEXITY, (count - 1) / 3)
