"""The normalisation of a model, which maps pixels from 0 to 1 to the values that the model takes.

Augmentations are defined on pixels from 0 to 1. Applied to normalised images they would be wrong without any error: for
example, clipping to [0, 1] removes half of the range of an image with values from -1 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from .view import ModelView


@dataclass(frozen=True)
class Normalisation:
    """The normalisation `(pixels - mean) / std` of each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, pixels: Tensor) -> Tensor:
        """Return what the model takes, given pixels from 0 to 1."""
        return (pixels - _channels(self.mean, pixels)) / _channels(self.std, pixels)

    def of_bytes(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        """Convert uint8 pixels, (N, height, width, channels), to what the model takes, (N, channels, height, width)."""
        return self.apply(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255)

    def to_bytes(self, images: Tensor) -> npt.NDArray[np.uint8]:
        """Convert images as the model takes them to uint8 pixels, (N, height, width, channels)."""
        return (self.undo(images).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()

    def undo(self, images: Tensor) -> Tensor:
        """Return pixels from 0 to 1, given what the model takes."""
        return images * _channels(self.std, images) + _channels(self.mean, images)


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


def model_normalisation(
    view: ModelView, mean: float | Sequence[float] | None = None, std: float | Sequence[float] | None = None
) -> Normalisation | None:
    """Return the given normalisation, or else that in the configuration of the model (`pretrained_cfg`), or else None.

    A model of timm has a configuration, and so has one that was loaded by name. No normalisation is assumed for a model
    whose configuration does not contain it.
    """
    if (mean is None) != (std is None):
        raise ConfigError(f"mean={mean}, std={std}: give both, or neither.")
    if mean is None or std is None:
        config = getattr(view.model, "pretrained_cfg", None) or {}
        mean, std = config.get("mean"), config.get("std")
        if not mean or not std or len(mean) != view.channels or len(std) != view.channels:
            return None  # timm's configuration describes the published weights, but this model has other channels
    found = Normalisation(_per_channel(view, "mean", mean), _per_channel(view, "std", std))
    if min(found.std) <= 0:
        raise ConfigError(f"std={std}: give deviations above 0.")
    return found


def _per_channel(view: ModelView, name: str, values: float | Sequence[float]) -> tuple[float, ...]:
    try:
        numbers = [float(values)] * view.channels if isinstance(values, (int, float)) else [float(v) for v in values]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if len(numbers) != view.channels or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{name}={values!r}: give a number, or one for each of the {view.channels} channels.")
    return tuple(numbers)


def processor_normalisation(processor: object) -> tuple[list[float], list[float]]:
    """Return mean and std from a transformers image processor, from torchvision weights, or from their transforms."""
    if hasattr(processor, "transforms"):  # torchvision weights
        processor = processor.transforms()
    for names in (("image_mean", "image_std"), ("mean", "std")):
        mean, std = (getattr(processor, name, None) for name in names)
        if mean is not None and std is not None:
            return [float(value) for value in mean], [float(value) for value in std]
    raise ConfigError(
        f"processor: a {type(processor).__name__} has no image_mean and image_std, and no mean and std: give a transformers "
        "image processor, or torchvision weights."
    )


def unknown_normalisation(model: str) -> ConfigError:
    """Return the error for a model that does not say how its images are normalised."""
    return ConfigError(
        f"This {model} does not say how its images are normalised: give mean= and std= (on the command line --mean and "
        "--std). They stand in a transformers model's image processor (image_mean, image_std) and in torchvision's "
        "weights.transforms() (mean, std); a model that timm.create_model made has its own (pretrained_cfg)."
    )
