"""Class tokens and conditioners of a model, and how well they tell domains and classes apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..core.adapter import Adapter
from ..data.corruptions import Integers
from ..errors import ConfigError, InputError
from ..methods.dct import DCT
from ..models.surgery import capture
from .attention import passing, vit_of
from .intervals import Floats, Interval, paired

Array = npt.NDArray[np.float32]
PARTS = ("input", "q", "k", "v")
PASSED = 16  # images at a time: their tokens after every block are in memory together
FOLDS = 5


@dataclass(frozen=True)
class Embedding:
    """Class tokens and conditioners of some images, (images, width) each.

    Args:
        class_tokens: By layer: after so many blocks. The last one is what enters the head, behind the final norm.
        conditioners: By block, counted from 0, and part: "q", "k" and "v" with their heads side by side, and "input", the
            class token behind the block's first norm, which they are made from.
    """

    class_tokens: dict[int, Array]
    conditioners: dict[tuple[int, str], Array]


@torch.no_grad()
def embed(
    model: nn.Module,
    images: Tensor,
    *,
    layers: Sequence[int],
    blocks: Sequence[int] = (),
) -> Embedding:
    """Return what a plain model, or an adapter, which stays as it is, makes of images.

    Args:
        model: Any that `adapt` takes, or what it returned.
        images: As the model takes them.
        layers: Whose class tokens are wanted, from 1 to the number of blocks.
        blocks: Whose conditioners are wanted, from 0: only an adapter by DCT has any.
    """
    adapter = model if isinstance(model, Adapter) else None
    view = vit_of(model)
    depth = len(view.blocks)
    for layer in layers:
        if not 1 <= layer <= depth:
            raise ConfigError(f"layers: {layer} is not one of 1 to {depth}, the layers of this model.")
    conditioned = conditioned_blocks(model)
    for block in blocks:
        if block not in conditioned:
            raise ConfigError(f"blocks: {block} has no conditioners ({_numbers(conditioned)} of this model have).")
    after = {layer: view.head if layer == depth else view.layers[layer - 1] for layer in layers}
    before = {block: view.blocks[block].norm1 for block in blocks}
    tokens: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    made: dict[tuple[int, str], list[Tensor]] = {(block, part): [] for block in blocks for part in PARTS}
    with passing(model) as run, capture([*after.values(), *before.values()]) as seen:
        for part in images.split(PASSED):
            run(part)
            for layer, module in after.items():
                tokens[layer].append(_kept(seen[module].inputs if layer == depth else seen[module].outputs[:, 0]))
            for block, norm in before.items():
                for name, vectors in _conditioners(adapter, block, seen[norm].outputs[:, 0]).items():
                    made[block, name].append(_kept(vectors))
            seen.clear()
    return Embedding(
        {k: torch.cat(v).numpy() for k, v in tokens.items()}, {k: torch.cat(v).numpy() for k, v in made.items()}
    )


def joined(embeddings: Sequence[Embedding]) -> Embedding:
    """Return embeddings one after another, as one."""
    first = embeddings[0]
    return Embedding(
        {key: np.concatenate([each.class_tokens[key] for each in embeddings]) for key in first.class_tokens},
        {key: np.concatenate([each.conditioners[key] for each in embeddings]) for key in first.conditioners},
    )


def conditioned_blocks(model: nn.Module) -> list[int]:
    """Return the blocks whose conditioners are made from the class token: none, if the method has no generators."""
    if not isinstance(model, Adapter) or not isinstance(model.method, DCT) or not model.method.generator:
        return []
    return [int(block) for block in model.method.generators]


def _conditioners(adapter: Adapter | None, block: int, class_token: Tensor) -> dict[str, Tensor]:
    assert adapter is not None and isinstance(adapter.method, DCT)
    generator: Any = adapter.method.generators[str(block)]
    return {"input": class_token, **{part: generator.generate(part, class_token).flatten(1) for part in PARTS[1:]}}


def _kept(vectors: Tensor) -> Tensor:
    """Return a copy, so that the rest of the tokens can go."""
    return vectors.float().cpu().clone()


def _numbers(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks)) or "none"


@dataclass(frozen=True)
class Separability:
    """How well points tell kinds apart."""

    by_image: Floats  # share of each image's points whose kind a linear probe tells that was not fitted to that image
    chance: float  # accuracy of always naming the most frequent kind
    silhouette: float  # -1 to 1: how much nearer a point is to its own kind than to the next one; 0 if no nearer

    @property
    def accuracy(self) -> float:
        """Return the accuracy of the probe."""
        return float(self.by_image.mean())

    def interval(self) -> Interval:
        """Return the accuracy with its interval over images."""
        return paired(self.by_image)

    def over(self, other: Separability) -> Interval:
        """Return how much more accurate this probe is than another one on the same images."""
        return paired(self.by_image - other.by_image)


def separability(points: Array, kinds: Integers, images: Integers, *, seed: int = 0) -> Separability:
    """Return how well points, (count, width), tell their kinds apart, every dimension brought to variance 1 first.

    The probe is a logistic regression, cross-validated. All points of one image are on the same side of a split: otherwise
    an image in fog would be recognised by its twin in frost. Every image has equally many points.

    Args:
        points: One in each row.
        kinds: Of every point: its domain, or its class.
        images: Of every point: which image it was made from.
        seed: Of the folds.
    """
    require_sklearn()
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import silhouette_score
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    counts = np.unique(kinds, return_counts=True)[1]
    if len(counts) < 2:
        raise InputError("All points are of one kind: there is nothing to tell apart. Give two domains, or two classes.")
    which = np.unique(images, return_inverse=True)[1]
    if which.max() + 1 < FOLDS:
        raise InputError(f"{which.max() + 1} images are too few for a probe: give at least {FOLDS}.")
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    with threadpool_limits(1):  # the products are small: threads would spend their time waiting for each other
        told = cross_val_predict(probe, points.astype(np.float64), kinds, groups=images, cv=folds)
        silhouette = silhouette_score(standardised(points), kinds)
    return Separability(
        by_image=np.bincount(which, told == kinds) / np.bincount(which),
        chance=float(counts.max() / counts.sum()),
        silhouette=float(silhouette),
    )


def standardised(points: Array) -> Floats:
    """Return points with mean 0 and variance 1 in every dimension, or 0 everywhere.

    A few dimensions of class tokens would outweigh the others.
    """
    wide = points.astype(np.float64)
    deviation = wide.std(0)
    return (wide - wide.mean(0)) / np.where(deviation > 1e-9 * np.abs(wide).max(initial=1e-30), deviation, np.inf)


def frequent(kinds: Integers, images: Integers) -> npt.NDArray[np.bool_]:
    """Return which points are of kinds that have an image for every fold."""
    enough = [kind for kind in np.unique(kinds) if len(np.unique(images[kinds == kind])) >= FOLDS]
    return np.isin(kinds, enough)


def require_sklearn() -> None:
    """Raise an error that says what to install, if scikit-learn is missing."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise ConfigError("Embeddings need scikit-learn: pip install 'acclimate[figures]'.") from None
