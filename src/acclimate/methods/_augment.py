"""Augmentations of pixels from 0 to 1, of shape (batch, channels, height, width).

All random numbers come from a given generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from ..core.engine import Engine

NOISE = 0.005  # standard deviation


def uniform(low: float, high: float, rng: torch.Generator) -> float:
    """Draw a number from the uniform distribution between low and high."""
    return low + (high - low) * float(torch.rand((), generator=rng, dtype=torch.float64))


def random_integer(low: int, high: int, rng: torch.Generator) -> int:
    """Draw one of the integers low, ..., high with equal probability."""
    return int(torch.randint(low, high + 1, (), generator=rng))


def jitter_and_move(pixels: Tensor, rng: torch.Generator, *, padding: str = "edge", blur: bool = True) -> Tensor:
    """Apply the random augmentation of CoTTA, without its noise, with the same parameters for the whole batch.

    The colours are changed in a random order. Then the image is padded by half its size, rotated, translated and scaled a
    little, blurred, cropped back to its size, and mirrored with probability 0.5.

    Args:
        pixels: The images.
        rng: The generator of the parameters. The number of draws does not depend on the batch.
        padding: The kind of padding: "edge" or "reflect".
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
    right, down = uniform(-1 / 16, 1 / 16, rng), uniform(-1 / 16, 1 / 16, rng)  # as a share of the padded size
    sigma = uniform(0.001, 0.5, rng)
    flip = uniform(0, 1, rng) < 0.5
    if not len(x):
        return x
    for change, factor in [list(changes.items())[i] for i in order]:
        if x.shape[1] == 3 or change not in (F.adjust_saturation, F.adjust_hue):  # these two need colours
            x = change(x, factor)
    x = F.pad(x, [width // 2, height // 2], padding_mode=padding)
    move = [round(right * x.shape[-1]), round(down * x.shape[-2])]
    x = F.affine(x, angle, move, scale, [0.0, 0.0], interpolation=InterpolationMode.BILINEAR)
    if blur:
        x = F.gaussian_blur(x, [5, 5], [sigma, sigma])
    x = F.center_crop(x, [height, width])
    return F.horizontal_flip(x) if flip else x


def noisy_view(images: Tensor, noise: Tensor, engine: Engine) -> Tensor:
    """Apply the complete augmentation of CoTTA, noise included, to normalised images.

    `noise` is standard normal and has the shape of the images.
    """
    pixels = jitter_and_move(engine.to_pixels(images), engine.rng)
    return engine.from_pixels((pixels + NOISE * noise.to(pixels)).clamp(0, 1))


def resized_crop(
    pixels: Tensor, rng: torch.Generator, *, least: float, interpolation: InterpolationMode = InterpolationMode.BILINEAR
) -> Tensor:
    """Crop the same random part of all images, and resize it to their size.

    `least` is the smallest share of the area that a crop may have.
    """
    height, width = pixels.shape[-2:]
    h, w = height, width
    for _ in range(10):  # a crop that does not fit is drawn again
        area = height * width * uniform(least, 1, rng)
        ratio = math.exp(uniform(math.log(3 / 4), math.log(4 / 3), rng))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            h, w = high, wide
            break
    top, left = random_integer(0, height - h, rng), random_integer(0, width - w, rng)
    return F.resized_crop(pixels, top, left, h, w, [height, width], interpolation, antialias=True)


def augmix(image: Tensor, rng: torch.Generator) -> Tensor:
    """Apply AugMix (Hendrycks et al., ICLR 2020) at severity 1 to a random crop of one image.

    The crop is mirrored with probability 0.5. Three chains of one to three operations each are mixed with weights from
    Dirichlet(1, 1, 1), and the mixture is mixed with the crop by a weight from Beta(1, 1).
    """
    x = mirrored(resized_crop(image[None], rng, least=0.08), rng)
    x = (x.clamp(0, 1) * 255).round()
    weights = -torch.rand(3, generator=rng, dtype=torch.float64).clamp_min(1e-12).log()
    mixed = torch.zeros_like(x)
    for weight in (weights / weights.sum()).tolist():
        link = x.to(torch.uint8)
        for _ in range(random_integer(1, 3, rng)):
            link = OPERATIONS[random_integer(0, len(OPERATIONS) - 1, rng)](link, rng)
        mixed = mixed + weight * link
    share = uniform(0, 1, rng)
    return (share * x + (1 - share) * mixed)[0] / 255


def _level(most: float, rng: torch.Generator) -> float:
    """Draw the strength of an AugMix operation at severity 1, which is at most a tenth of `most`."""
    return uniform(0.1, 1, rng) * most / 10


def _signed(level: float, rng: torch.Generator) -> float:
    """Return the level with a random sign."""
    return level if uniform(0, 1, rng) < 0.5 else -level


def _warp(x: Tensor, *, move: tuple[int, int] = (0, 0), shear: tuple[float, float] = (0, 0)) -> Tensor:
    """Translate and shear images about the origin of the pixel coordinates, and fill the empty area with black."""
    degrees = [math.degrees(math.atan(s)) for s in shear]
    return F.affine(x, 0.0, list(move), 1.0, degrees, interpolation=InterpolationMode.BILINEAR, center=[0.0, 0.0])


OPERATIONS: tuple[Callable[[Tensor, torch.Generator], Tensor], ...] = (
    lambda x, rng: F.autocontrast(x),
    lambda x, rng: F.equalize(x),
    lambda x, rng: F.rotate(x, _signed(int(_level(30, rng)), rng), interpolation=InterpolationMode.BILINEAR),
    lambda x, rng: F.solarize(x, 256 - int(_level(256, rng))),
    lambda x, rng: _warp(x, shear=(_signed(_level(0.3, rng), rng), 0)),
    lambda x, rng: _warp(x, shear=(0, _signed(_level(0.3, rng), rng))),
    lambda x, rng: _warp(x, move=(int(_signed(int(_level(x.shape[-1] / 3, rng)), rng)), 0)),
    lambda x, rng: _warp(x, move=(0, int(_signed(int(_level(x.shape[-2] / 3, rng)), rng)))),
    lambda x, rng: F.posterize(x, 4 - int(_level(4, rng))),
)


def mirrored(image: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror the image horizontally with probability 0.5."""
    return F.horizontal_flip(image) if uniform(0, 1, rng) < 0.5 else image


def moco_view(image: Tensor, rng: torch.Generator) -> Tensor:
    """Apply the random augmentation of MoCo v2 without its crop.

    Its parts are changes of colour, conversion to grey, blur and mirroring.
    """
    x = image.clamp(0, 1)
    if uniform(0, 1, rng) < 0.8:
        changes: list[tuple[Callable[[Tensor, float], Tensor], float]] = [
            (F.adjust_brightness, uniform(0.6, 1.4, rng)),
            (F.adjust_contrast, uniform(0.6, 1.4, rng)),
            (F.adjust_saturation, uniform(0.6, 1.4, rng)),
            (F.adjust_hue, uniform(-0.1, 0.1, rng)),
        ]
        usable = len(changes) if x.shape[-3] == 3 else 2  # the last two need colours
        for i in torch.randperm(usable, generator=rng).tolist():
            x = changes[i][0](x, changes[i][1])
    if uniform(0, 1, rng) < 0.2 and x.shape[-3] == 3:
        x = F.rgb_to_grayscale(x, num_output_channels=3)
    if uniform(0, 1, rng) < 0.5:
        sigma = uniform(0.1, 2, rng)
        size = 2 * math.ceil(3 * sigma) + 1
        x = F.gaussian_blur(x, [size, size], [sigma, sigma])
    return mirrored(x, rng)


def views_of_each(
    images: Tensor, engine: Engine, makers: Sequence[Callable[[Tensor, torch.Generator], Tensor]]
) -> tuple[Tensor, ...]:
    """Return one batch of views of normalised images for each maker.

    Every image has its own random numbers, which do not depend on the division of the batch.
    """
    positions, total = engine.ranks.positions(images)
    seeds = torch.randint(2**62, (total,), generator=engine.rng)[positions].tolist()
    made = [images.new_zeros(0, len(makers), *images.shape[1:])]
    for image, seed in zip(engine.to_pixels(images), seeds):
        rng = torch.Generator().manual_seed(seed)
        made.append(torch.stack([make(image, rng) for make in makers])[None])
    return engine.from_pixels(torch.cat(made)).unbind(1)
