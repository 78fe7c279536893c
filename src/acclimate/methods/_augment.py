"""Augmentations of pixels from 0 to 1, (batch, channels, height, width); all that is random comes from a given generator."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F


def uniform(low: float, high: float, rng: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=rng, dtype=torch.float64))


def whole(low: int, high: int, rng: torch.Generator) -> int:
    """Of low, ..., high."""
    return int(torch.randint(low, high + 1, (), generator=rng))


def jitter_and_move(pixels: Tensor, rng: torch.Generator, *, padding: str = "edge", blur: bool = True) -> Tensor:
    """CoTTA's random view, with the same parameters for the whole batch, but for the noise that it adds at the end.

    Colours change in a random order; then the picture, padded by half its size, is rotated, moved and scaled a little,
    blurred, cropped back to its size, and mirrored half of the time.

    Args:
        pixels: The pictures.
        rng: Where the parameters are drawn from, the same number of them whatever the batch.
        padding: "edge", or "reflect".
        blur: Whether to blur.
    """
    height, width = pixels.shape[-2:]
    x = pixels.clamp(0, 1)
    changes = {
        F.adjust_brightness: uniform(0.6, 1.4, rng),
        F.adjust_contrast: uniform(0.7, 1.3, rng),
        F.adjust_saturation: uniform(0.5, 1.5, rng),
        F.adjust_hue: uniform(-0.06, 0.06, rng),
        F.adjust_gamma: uniform(0.7, 1.3, rng),
    }
    order = torch.randperm(len(changes), generator=rng).tolist()
    angle, scale = uniform(-15, 15, rng), uniform(0.9, 1.1, rng)
    right, down = uniform(-1 / 16, 1 / 16, rng), uniform(-1 / 16, 1 / 16, rng)  # of the padded size
    sigma = uniform(0.001, 0.5, rng)
    mirrored = uniform(0, 1, rng) < 0.5
    if not len(x):
        return x
    for change, factor in [list(changes.items())[i] for i in order]:
        if x.shape[1] == 3 or change not in (F.adjust_saturation, F.adjust_hue):  # which are of colours
            x = change(x, factor)
    x = F.pad(x, [width // 2, height // 2], padding_mode=padding)
    move = [round(right * x.shape[-1]), round(down * x.shape[-2])]
    x = F.affine(x, angle, move, scale, [0.0, 0.0], interpolation=InterpolationMode.BILINEAR)
    if blur:
        x = F.gaussian_blur(x, [5, 5], [sigma, sigma])
    x = F.center_crop(x, [height, width])
    return F.horizontal_flip(x) if mirrored else x


def resized_crop(pixels: Tensor, rng: torch.Generator, *, least: float) -> Tensor:
    """A random part of the pictures, of at least that share of their area, at their size; the same part of each."""
    height, width = pixels.shape[-2:]
    h, w = height, width
    for _ in range(10):  # a part that does not fit is drawn again
        area = height * width * uniform(least, 1, rng)
        ratio = math.exp(uniform(math.log(3 / 4), math.log(4 / 3), rng))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            h, w = high, wide
            break
    top, left = whole(0, height - h, rng), whole(0, width - w, rng)
    return F.resized_crop(pixels, top, left, h, w, [height, width], antialias=True)
