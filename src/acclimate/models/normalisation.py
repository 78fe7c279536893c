"""The model's normalisation: augmentations are defined on pixels from 0 to 1, a model takes something else.

To augment what is normalised already would be wrong without an error: whatever clips to [0, 1] destroys half of an image
that lies between -1 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from .view import ViT


@dataclass(frozen=True)
class Normalisation:
    """Per channel, `(pixels - mean) / std`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, pixels: Tensor) -> Tensor:
        return (pixels - _channels(self.mean, pixels)) / _channels(self.std, pixels)

    def undo(self, images: Tensor) -> Tensor:
        return images * _channels(self.std, images) + _channels(self.mean, images)


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


def normalisation(
    vit: ViT, mean: float | Sequence[float] | None = None, std: float | Sequence[float] | None = None
) -> Normalisation | None:
    """What was given, else what a timm model says of itself, else None: nothing is assumed."""
    if (mean is None) != (std is None):
        raise ConfigError(f"mean={mean}, std={std}: give both, or neither.")
    if mean is None or std is None:
        config = (getattr(vit.model, "pretrained_cfg", None) or {}) if vit.family == "timm" else {}
        mean, std = config.get("mean"), config.get("std")
        if not mean or not std or len(mean) != vit.channels or len(std) != vit.channels:
            return None  # timm's configuration is of the published weights; this model may have other channels
    found = Normalisation(_per_channel(vit, "mean", mean), _per_channel(vit, "std", std))
    if min(found.std) <= 0:
        raise ConfigError(f"std={std}: give deviations above 0.")
    return found


def _per_channel(vit: ViT, name: str, values: float | Sequence[float]) -> tuple[float, ...]:
    try:
        numbers = [float(values)] * vit.channels if isinstance(values, (int, float)) else [float(v) for v in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != vit.channels or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{name}={values!r}: give a number, or one for each of the {vit.channels} channels.")
    return tuple(numbers)


def unknown_normalisation(model: str) -> ConfigError:
    """The error of a method that augments, with a model that does not say how its images are normalised."""
    return ConfigError(
        f"This method augments pixels, and this {model} does not say how they are normalised: give adapt(..., mean=, std=). "
        "They stand in a transformers model's image processor (image_mean, image_std) and in torchvision's "
        "weights.transforms() (mean, std); a model that timm.create_model made has its own (pretrained_cfg)."
    )
