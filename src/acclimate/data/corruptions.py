"""Corruptions of images: the fifteen corruptions of ImageNet-C, and its four extra ones.

    noisy = corrupt(images, "gaussian_noise", severity=5)  # uint8 (N, height, width, 3) in and out

The formulas are those of the package `imagecorruptions` 1.1.2, which extends those of Hendrycks and Dietterich (2019) to
images of any size. The replay of recordings compares our images with those of the package. The package differs from the
program that made ImageNet-C, and so do we: motion_blur and snow use another motion blur than that of ImageMagick, and
elastic_transform has other constants and no affine part. As in both programs, glass_blur copies the colour of a neighbour
instead of exchanging the two, and frost draws from five of its six photographs. Unlike both, we generate the ice for frost,
unless a folder with the photographs is given.

With the constants of CIFAR-10-C, two things are as in its own program: elastic_transform has an affine part, without which
its first severity would have no effect (a single interpolation does both), and ice is shown at a fifth of its size.

Every image has its own random numbers, seeded by (seed, corruption, severity, index of the image). The corrupted image
therefore does not depend on the batch, on the order or on the number of threads.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.files import file_digest
from ..errors import ConfigError, InputError, require_whole, suggest
from . import _formulas as formulas
from ._formulas import Random, Textures
from ._frost import ice, photographs

Pixels = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
CORRUPTIONS = tuple(name for names in GROUPS.values() for name in names)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITIES = (1, 2, 3, 4, 5)

# The arguments of each formula at severities 1 to 5.
CONSTANTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "imagenet-c": {
        "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
        "shot_noise": (60, 25, 12, 5, 3),
        "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "frost": ((1, 0.4, 1.1), (0.8, 0.6, 1.1), (0.7, 0.7, 1.1), (0.65, 0.7, 1.1), (0.6, 0.75, 1.1)),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
        "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
        "elastic_transform": ((0.0625, 0.01, 0), (0.08125, 0.01, 0), (0.10625, 0.01, 0), (0.125, 0.01, 0), (0.15, 0.01, 0)),
        "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
        "jpeg_compression": (25, 18, 15, 10, 7),
        "speckle_noise": (0.15, 0.2, 0.35, 0.45, 0.6),
        "gaussian_blur": (1, 2, 3, 4, 6),
        "spatter": (
            (0.65, 0.3, 4, 0.69, 0.6, 0),
            (0.65, 0.3, 3, 0.68, 0.6, 0),
            (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1),
            (0.67, 0.4, 1, 0.65, 1.5, 1),
        ),
        "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    },
    "cifar-10-c": {
        "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
        "shot_noise": (500, 250, 100, 75, 50),
        "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "frost": ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
        "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
        "elastic_transform": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
        "jpeg_compression": (80, 65, 58, 50, 40),
        "speckle_noise": (0.06, 0.1, 0.12, 0.16, 0.2),
        "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1),
        "spatter": (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
        "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    },
}
SMALL = 64  # largest shorter side, in pixels, for the constants of CIFAR-10-C
LONGEST_SIDE = 16_384  # pixels; fog and frost need squares of the longer side, here about 6 GiB
CHUNK = 2**18  # values per computation, which fit into the cache of a processor


def constants_for(height: int, width: int) -> str:
    """Return the name of the constants that suit a size.

    It is "cifar-10-c" up to a shorter side of 64 pixels, and "imagenet-c" above.
    """
    return "cifar-10-c" if min(height, width) <= SMALL else "imagenet-c"


def corrupt(
    images: Pixels,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    indices: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
    constants: str | None = None,
    frost: str | os.PathLike[str] | None = None,
) -> Pixels:
    """Return corrupted copies of images.

    Args:
        images: uint8 RGB images of any size, (height, width, 3) or (N, height, width, 3).
        name: One of `CORRUPTIONS` or `EXTRA`.
        severity: A severity from 1 (weak) to 5 (strong).
        seed: The seed of all random numbers.
        indices: The indices of the images in their data set. The random numbers of an image depend on its index. Default: 0,
            1, 2, ...
        constants: The strengths of the severities: "imagenet-c" or "cifar-10-c". Default: chosen by size (`constants_for`).
        frost: A folder with the photographs of ice that ImageNet-C used (frost1.png, ...). Default: generated ice.
    """
    require_valid(name, severity, seed, constants)
    _require_images(images)
    batch = images if images.ndim == 4 else images[None]
    indices = _numbers(indices, len(batch))
    constants = constants or constants_for(*batch.shape[1:3])
    textures = ice() if frost is None else photographs(Path(frost))
    key = zlib.crc32(name.encode())

    def generator(number: int) -> np.random.Generator:
        # SFC64 is the fastest generator of numpy
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(key, severity, number))))

    step = max(1, CHUNK // batch[0].size)
    parts = [slice(start, start + step) for start in range(0, len(batch), step)]
    if len(parts) == 1:
        out = apply(batch, name, severity, map(generator, indices), constants=constants, textures=textures)
    else:
        out = np.empty_like(batch)
        for part in parts:
            rngs = map(generator, indices[part])
            out[part] = apply(batch[part], name, severity, rngs, constants=constants, textures=textures)
    return out.reshape(images.shape)


def apply(images: Pixels, name: str, severity: int, rngs: Iterable[Random], *, constants: str, textures: Textures) -> Pixels:
    """Corrupt images with given random generators, one per image, and given textures of ice."""
    chosen = CONSTANTS[constants][name][severity - 1]
    formula = getattr(formulas, name)
    if name == "frost":
        formula = functools.partial(formula, textures=textures)
    return formulas.whole_levels(formula(images, rngs, *(chosen if isinstance(chosen, tuple) else (chosen,))))


@dataclass(frozen=True)
class Corruption:
    """A corruption that is made on the fly. The arguments are those of `corrupt`."""

    name: str
    severity: int
    seed: int = 0
    constants: str | None = None
    frost: str | None = None

    def __post_init__(self) -> None:
        require_valid(self.name, self.severity, self.seed, self.constants)
        if self.frost is not None:
            photographs(Path(self.frost))  # raises an error now rather than in the first batch

    def __call__(self, pixels: Pixels, indices: Integers) -> Pixels:
        """Return corrupted copies of images, given their indices in the data set."""
        options: Any = dict(seed=self.seed, constants=self.constants, frost=self.frost)
        return corrupt(pixels, self.name, self.severity, indices=indices, **options)

    def description(self) -> dict[str, Any]:
        """Return everything that determines the corrupted images, as values for JSON."""
        drawn_on: Any = "procedural" if self.name == "frost" else None
        if drawn_on and self.frost:
            files = photographs(Path(self.frost)).files
            drawn_on = {file.name: file_digest(file) for file in files}
        return {**asdict(self), "constants": self.constants or "by size", "frost": drawn_on}


def require_valid(name: str, severity: int, seed: int, constants: str | None) -> None:
    """Refuse a corruption, severity, seed or name of constants that does not exist."""
    known = (*CORRUPTIONS, *EXTRA)
    if name not in known:
        raise ConfigError(f"unknown corruption {name!r}.{suggest(str(name), known, 0.4)} There are: {', '.join(known)}.")
    if isinstance(severity, bool) or not isinstance(severity, (int, np.integer)) or severity not in SEVERITIES:
        raise ConfigError(f"severity={severity!r}: give a whole number from 1 to 5.")
    require_whole(0, seed=seed)
    if constants is not None and constants not in CONSTANTS:
        raise ConfigError(f"constants={constants!r}: give {' or '.join(map(repr, CONSTANTS))}, or None to choose by size.")


def _require_images(images: Pixels) -> None:
    if not isinstance(images, np.ndarray):
        raise InputError(f"images are a {type(images).__name__}: give a numpy array, for example np.asarray(image).")
    if images.dtype != np.uint8:
        raise InputError(
            f"images are {images.dtype}: give uint8 from 0 to 255, for example np.rint(255 * images).astype(np.uint8)."
        )
    if images.ndim not in (3, 4) or images.shape[-1] != 3:
        raise InputError(
            f"images have shape {images.shape}: give RGB as (height, width, 3) or (N, height, width, 3); "
            "an image of another kind becomes that with PIL's image.convert('RGB')."
        )
    if not images.size:
        raise InputError(f"images have shape {images.shape}: there is nothing to corrupt.")
    if max(images.shape[-3:]) > LONGEST_SIDE:
        raise InputError(f"images have shape {images.shape}: corruptions take sides of {LONGEST_SIDE} pixels at most.")


def _numbers(indices: Sequence[int] | npt.NDArray[np.integer[Any]] | None, count: int) -> list[int]:
    indices = np.arange(count) if indices is None else np.atleast_1d(np.asarray(indices))
    if indices.shape != (count,) or indices.dtype.kind not in "iu" or indices.min() < 0:
        raise InputError(
            f"indices of shape {indices.shape}, {indices.dtype}: give one whole number of 0 or more per image ({count})."
        )
    return indices.tolist()
