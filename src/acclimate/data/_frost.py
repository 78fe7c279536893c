"""Textures of ice for the corruption `frost`, generated here or read from a folder of photographs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import ConfigError, UnreadableError
from . import _filters as filters
from ._filters import Array
from ._formulas import Random
from .imagefile import open_image

SIDE = 512
FERNS = 90  # per layer
# Mean and standard deviation of the brightness, and number of layers of ferns, for each texture. Together they have about
# the brightness and contrast of the photographs of ImageNet-C.
PANES = ((0.45, 0.18, 3), (0.53, 0.16, 4), (0.60, 0.14, 5), (0.68, 0.13, 7), (0.76, 0.12, 9))
DRAWN = 5  # of the six photographs; the program of ImageNet-C never draws the last one


class Textures:
    """Images of ice from which random crops are taken, and the files that they were read from."""

    def __init__(self, images: list[Array], files: Sequence[Path] = ()) -> None:
        self.images, self.files = images, files

    def __call__(self, rng: Random, height: int, width: int, scale: float) -> Array:
        """Return a random crop of a scaled texture, which is enlarged further if it is smaller than the crop."""
        which = int(rng.integers(0, len(self.images)))
        tall, wide = self.images[which].shape[:2]
        covering = max(height / tall, width / wide)
        grown = _scaled(self, which, max(scale * max(1.0, covering), covering))
        top = int(rng.integers(0, max(1, grown.shape[0] - height)))
        left = int(rng.integers(0, max(1, grown.shape[1] - width)))
        return grown[top : top + height, left : left + width]


@functools.lru_cache(maxsize=8)  # five textures at one scale, and few more, because they may be large
def _scaled(textures: Textures, which: int, scale: float) -> Array:
    image = textures.images[which]
    size = (int(np.ceil(image.shape[1] * scale)), int(np.ceil(image.shape[0] * scale)))
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))


@functools.lru_cache(maxsize=4)
def photographs(folder: Path) -> Textures:
    """Return the images frost1.png, frost2.png, ... of a folder, sorted by name, up to the fifth."""
    files = sorted(path for path in folder.glob("frost*") if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
    if not files:
        raise ConfigError(f"frost={str(folder)!r}: there is no frost1.png, frost2.png, ... in this folder.")
    files = files[:DRAWN]
    try:
        return Textures([_read(path) for path in files], files)
    except UnreadableError as error:
        raise ConfigError(f"frost={str(folder)!r}: {error}.") from None


def _read(path: Path) -> Array:
    with open_image(path) as image:
        return np.asarray(image.convert("RGB"))


@functools.lru_cache(maxsize=1)
def ice() -> Textures:
    """Return generated textures of ice."""
    return Textures([_pane(np.random.Generator(np.random.SFC64(i)), *pane) for i, pane in enumerate(PANES)])


def _pane(rng: np.random.Generator, mean: float, spread: float, layers: int) -> Array:
    light = 0.5 * filters.plasma(rng.uniform(-1, 1, (1, SIDE * SIDE - 1)), SIDE, 1.7)[0]
    for _ in range(layers):
        needles = 1 - np.exp(-_ferns(rng))
        relief = needles - np.roll(needles, (1, 1), (0, 1))  # lit from the upper left
        cover = (2 * filters.gaussian(needles[None], 2.0)[0]).clip(0, 1)
        light += cover * (0.2 + 0.6 * needles + 0.4 * relief - 0.8 * light)  # the layers below remain partly visible
    light += 0.03 * rng.standard_normal((SIDE, SIDE))
    light = mean + spread * (light - light.mean()) / light.std()
    shadow, white = np.array([0.05, 0.15, 0.24]), np.array([0.95, 0.98, 1.0])  # dark ice is blue
    return np.rint(255 * (shadow + (white - shadow) * light[..., None].clip(0, 1))).astype(np.uint8)


def _ferns(rng: np.random.Generator) -> Array:
    """Return the thickness of the ice at each pixel.

    The ice consists of ferns, whose branches leave their stem at 60 degrees and have branches themselves.
    """
    start = rng.uniform(0, SIDE, (FERNS, 2))
    angle = rng.uniform(0, 2 * np.pi, FERNS)
    length = 25 * rng.lognormal(0, 0.7, FERNS)
    lines = []
    for _ in range(3):  # stems, branches, and branches of branches
        heading = np.stack([np.sin(angle), np.cos(angle)], axis=1)
        at, which = _along(length, 0.5)
        lines.append(start[which] + at[:, None] * heading[which])
        at, which = _along(length, 4.5)
        at, which = np.repeat(at, 2), np.repeat(which, 2)  # one branch on each side
        side = np.tile([np.pi / 3, -np.pi / 3], len(which) // 2)
        start = start[which] + at[:, None] * heading[which]
        length = 0.4 * (length[which] - at) * rng.uniform(0.6, 1, len(which))  # branches are shorter towards the tip
        angle = angle[which] + side + rng.normal(0, 0.05, len(which))
    row, column = np.concatenate(lines).astype(int).T % SIDE
    return np.bincount(row * SIDE + column, minlength=SIDE * SIDE).reshape(SIDE, SIDE)


def _along(length: Array, spacing: float) -> tuple[Array, Array]:
    """Return positions at even steps along lines, and the index of the line of each."""
    steps = (length / spacing).astype(int) + 1
    which = np.repeat(np.arange(len(length)), steps)
    return (np.arange(len(which)) - np.repeat(steps.cumsum() - steps, steps)) * spacing, which
