"""The nineteen corruptions, one function each.

A function takes uint8 images (N, height, width, 3), one random generator per image, and the constants of a severity. It
returns values from 0 to 255, which are not yet clipped and cut to integers. Random numbers are drawn in the order of the
package `imagecorruptions`, so that the generator of that package reproduces its images.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from PIL import Image

from . import _filters as filters
from ._filters import Array

WATER, MUD = np.array([(175, 238, 238), (63, 42, 20)], np.float32)


class Random(Protocol):
    """The interface of a random generator, which `numpy.random.Generator` implements."""

    def random(self, size: tuple[int, ...]) -> Array: ...
    def standard_normal(self, size: tuple[int, ...]) -> Array: ...
    def uniform(self, low: float, high: float, size: tuple[int, ...] | None = None) -> Array: ...
    def integers(self, low: int, high: int, size: tuple[int, ...] | None = None) -> Array: ...
    def poisson(self, lam: Array) -> Array: ...


Rngs = Iterable[Random]  # one per image, each created when it is needed
Textures = Callable[[Random, int, int, float], Array]  # generator, height, width, scale -> a crop of ice


def gaussian_noise(images: Array, rngs: Rngs, scale: float) -> Array:
    """Add Gaussian noise."""
    return images + 255 * scale * np.stack([rng.standard_normal(images.shape[1:]) for rng in rngs])


def shot_noise(images: Array, rngs: Rngs, photons: float) -> Array:
    """Replace each value by a Poisson variable, as if by a number of photons."""
    levels = np.arange(256) / 255 * photons
    return np.stack([rng.poisson(levels[image]) for image, rng in zip(images, rngs)]) * (255 / photons)


def impulse_noise(images: Array, rngs: Rngs, amount: float) -> Array:
    """Set a share of the values to 0 or 255."""
    out = images.copy()
    for image, rng in zip(out, rngs):
        hit = rng.random(image.shape) <= amount
        image[hit] = 255 * (rng.random(image.shape) <= 0.5)[hit]
    return out


def speckle_noise(images: Array, rngs: Rngs, scale: float) -> Array:
    """Add Gaussian noise that is proportional to the value."""
    return images * (1 + scale * np.stack([rng.standard_normal(images.shape[1:]) for rng in rngs]))


def gaussian_blur(images: Array, rngs: Rngs, sigma: float) -> Array:
    """Blur with a Gaussian."""
    return filters.gaussian(images.astype(np.float32), sigma)


def glass_blur(images: Array, rngs: Rngs, sigma: float, reach: int, rounds: int) -> Array:
    """Move pixels to random positions nearby, between two Gaussian blurs."""
    soft = filters.gaussian(images.astype(np.float32), sigma)
    height, width = images.shape[1:3]
    rows, columns = np.arange(height - reach, reach, -1), np.arange(width - reach, reach, -1)
    pixels = np.arange(height * width)
    place = rows[:, None] * width + columns
    shattered = whole_levels(soft).reshape(len(images), height * width, 3)
    for i, rng in enumerate(rngs):
        for offsets in rng.integers(-reach, reach, (rounds, len(rows), len(columns), 2)):
            # From the last pixel to the first, each pixel takes the colour of a neighbour. If the neighbour comes later in
            # the image, its colour was replaced before. So the source is followed until it is a pixel not yet replaced.
            taken = pixels.copy()
            taken[place] = place + offsets[..., 1] * width + offsets[..., 0]
            source = np.concatenate([np.where(taken > pixels, taken, taken + len(pixels)), pixels + len(pixels)])
            while True:
                further = source[source]
                if np.array_equal(further, source):
                    break
                source = further
            shattered[i] = shattered[i][source[: len(pixels)] - len(pixels)]
    return filters.gaussian(shattered.reshape(images.shape).astype(np.float32), sigma)


def defocus_blur(images: Array, rngs: Rngs, radius: float, softness: float) -> Array:
    """Blur with a disk."""
    kernel = filters.disk(radius, softness)
    return np.stack([filters.convolve(image, kernel) for image in images.astype(np.float32)])


def motion_blur(images: Array, rngs: Rngs, radius: int, sigma: float) -> Array:
    """Blur along a line at a random angle."""
    angles = [float(rng.uniform(-45, 45)) for rng in rngs]
    return np.stack([filters.motion_blur(x, radius, sigma, a) for x, a in zip(images.astype(np.float32), angles)])


def zoom_blur(images: Array, rngs: Rngs, stop: float, step: float) -> Array:
    """Average enlarged copies of the image."""
    sharp = images.astype(np.float32)
    height, width = images.shape[1:3]
    factors = np.arange(1, stop, step)
    total = sharp.copy()
    for factor in factors:
        total += filters.clipped_zoom(sharp, float(factor))[:, :height, :width]
    return total / (len(factors) + 1)


def snow(
    images: Array,
    rngs: Rngs,
    mean: float,
    spread: float,
    zoom: float,
    threshold: float,
    radius: int,
    sigma: float,
    opacity: float,
) -> Array:
    """Whiten the image, and add a layer of falling flakes."""
    height, width = images.shape[1:3]
    noise, angles = zip(*((rng.standard_normal((height, width)), float(rng.uniform(-135, -45))) for rng in rngs))
    flakes = filters.clipped_zoom(mean + spread * np.stack(noise), zoom)
    flakes[flakes < threshold] = 0
    flakes = flakes.clip(0, 1).astype(np.float32)
    fallen = np.stack([filters.motion_blur(layer, radius, sigma, a) for layer, a in zip(flakes, angles)])
    layer = np.rint(255 * fallen)[:, :height, :width, None]
    whitened = np.maximum(images, 1.5 * grey(images) + 127.5)
    return opacity * images.astype(np.float32) + (1 - opacity) * whitened + layer + layer[:, ::-1, ::-1]


def frost(images: Array, rngs: Rngs, keep: float, ice: float, scale: float, *, textures: Textures) -> Array:
    """Blend the image with a random crop of a texture of ice."""
    height, width = images.shape[1:3]
    crops = np.stack([textures(rng, height, width, scale) for rng in rngs])
    return np.float32(keep) * images + np.float32(ice) * crops


def fog(images: Array, rngs: Rngs, amount: float, decay: float) -> Array:
    """Add clouds, and reduce the contrast."""
    height, width = images.shape[1:3]
    size = 2 ** (max(height, width, 3) - 1).bit_length()
    clouds = filters.plasma(np.stack([rng.uniform(-1, 1, (size * size - 1,)) for rng in rngs]), size, decay)
    clouds = clouds[:, :height, :width, None].astype(np.float32)
    brightest = images.max((1, 2, 3), keepdims=True) / np.float32(255)
    return (images + np.float32(255 * amount) * clouds) * (brightest / (brightest + np.float32(amount)))


def brightness(images: Array, rngs: Rngs, amount: float) -> Array:
    """Raise the value in HSV, which scales a colour. Black has no colour and becomes grey."""
    value = _over_channels(np.maximum, images)
    levels = np.arange(256, dtype=np.float32)
    raised = np.minimum(levels + np.float32(255 * amount), 255)
    factor = raised / np.maximum(levels, 1)
    return np.where(value == 0, raised[0], images * factor[value])


def saturate(images: Array, rngs: Rngs, factor: float, offset: float) -> Array:
    """Change the saturation in HSV. Grey is treated as red with a saturation of zero."""
    value = _over_channels(np.maximum, images).astype(np.float32)
    chroma = value - _over_channels(np.minimum, images)
    changed = chroma / np.maximum(value, 1) * np.float32(factor) + np.float32(offset)
    shown = value * np.minimum(changed, 1) / np.maximum(chroma, 1)
    coloured = value - (value - images) * shown
    red = value * (1 - np.float32(offset) * np.array([0, 1, 1], np.float32))
    return np.where(chroma > 0, coloured, red)


def contrast(images: Array, rngs: Rngs, factor: float) -> Array:
    """Move all values towards the mean of their channel."""
    total = images.sum(1, keepdims=True, dtype=np.int64).sum(2, keepdims=True)  # of integers: independent of the order
    means = total / (images.shape[1] * images.shape[2])
    return images * np.float32(factor) + (means * (1 - factor)).astype(np.float32)


def elastic_transform(images: Array, rngs: Rngs, amplitude: float, sigma: float, affine: float) -> Array:
    """Displace pixels at random.

    The amplitude of the displacements, the width of their smoothing, and the shift of the three corners of the affine part
    are in units of the side of the image.
    """
    height, width = images.shape[1:3]
    grid = np.indices((height, width), dtype=np.float64)
    matrices, drawn = zip(*((_affine(rng, height, width, affine), rng.uniform(-1, 1, (2, height, width))) for rng in rngs))
    along, down = (
        filters.gaussian(x, (sigma * height, sigma * width), truncate=3.0, border="symmetric")
        for x in np.stack(drawn, axis=1) * (amplitude * height)
    )
    out = np.empty(images.shape, np.float32)
    for i, image in enumerate(images.astype(np.float32)):
        rows, columns = grid[0] + down[i], grid[1] + along[i]
        if matrices[i] is not None:
            rows, columns = (m[0] * rows + m[1] * columns + m[2] for m in matrices[i])
        out[i] = filters.sample(image, rows, columns)
    return out


def _affine(rng: Random, height: int, width: int, shift: float) -> Array | None:
    """Return the affine map (2, 3) from positions in the corrupted image to positions in the clean image.

    The map is given by random shifts of three corners of a square.
    """
    if not shift:
        return None
    side = min(height, width)
    reach = max(1, side // 3)
    corners = np.array([height // 2, width // 2]) + reach * np.array([(1, 1), (-1, 1), (-1, -1)])
    moved = corners + rng.uniform(-1, 1, (3, 2))[:, ::-1] * (shift * side)
    return np.linalg.solve(np.column_stack([moved, np.ones(3)]), corners.astype(np.float64)).T


def pixelate(images: Array, rngs: Rngs, scale: float) -> Array:
    """Reduce the resolution."""
    height, width = images.shape[1:3]
    coarse = (max(1, int(width * scale)), max(1, int(height * scale)))
    out = np.empty_like(images)
    for i, image in enumerate(images):
        small = Image.fromarray(image).resize(coarse, Image.Resampling.BOX)
        out[i] = np.asarray(small.resize((width, height), Image.Resampling.NEAREST))
    return out


def jpeg_compression(images: Array, rngs: Rngs, quality: int) -> Array:
    """Compress the image as JPEG."""
    out = np.empty_like(images)
    for i, image in enumerate(images):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        out[i] = np.asarray(Image.open(file, formats=("JPEG",)))
    return out


def spatter(
    images: Array, rngs: Rngs, mean: float, spread: float, sigma: float, threshold: float, strength: float, mud: int
) -> Array:
    """Add drops of water or mud."""
    noise = np.stack([rng.standard_normal(images.shape[1:3]) for rng in rngs])
    liquid = filters.gaussian(mean + spread * noise, sigma)
    liquid[liquid < threshold] = 0
    if mud:
        cover = filters.gaussian((liquid > threshold).astype(np.float32), strength)
        cover[cover < 0.8] = 0
        return images * (1 - cover[..., None]) + _in_colour(cover, MUD)
    drops = (255 * liquid).astype(np.uint8)
    distance = filters.chamfer_distance(filters.edges(drops, 50, 150), limit=20)
    relief = filters.equalise(filters.box(distance).astype(np.uint8))
    light = drops * np.rint(filters.box(_lit(relief)))
    light *= strength / np.maximum(light.max((1, 2), keepdims=True), 1)
    return images + _in_colour(light, WATER)


def _lit(relief: Array) -> Array:
    """Return the brightness of a relief that is lit from the upper left."""
    height, width = relief.shape[1:]
    wide = np.pad(relief.astype(np.int16), ((0, 0), (1, 1), (1, 1)), mode="reflect")
    total = sum(
        weight * wide[:, row : row + height, column : column + width]
        for row, weights in enumerate(((-2, -1, 0), (-1, 1, 1), (0, 1, 2)))
        for column, weight in enumerate(weights)
        if weight
    )
    return np.clip(total, 0, 255).astype(np.float32)


def _in_colour(layers: Array, colour: Array) -> Array:
    """Return `layers[..., None] * colour`. In numpy this product is slow along an axis of three."""
    return np.stack([layers * part for part in colour], axis=-1)


def _over_channels(reduce: np.ufunc, images: Array) -> Array:
    """Return `reduce.reduce(images, axis=-1, keepdims=True)`. In numpy this is slow along an axis of three."""
    return reduce(reduce(images[..., :1], images[..., 1:2]), images[..., 2:])


def grey(images: Array) -> Array:
    """Return the luminance, (N, height, width, 1)."""
    red, green, blue = np.moveaxis(images.astype(np.float32), -1, 0)
    return (np.float32(0.299) * red + np.float32(0.587) * green + np.float32(0.114) * blue)[..., None]


def whole_levels(values: Array) -> Array:
    """Clip the values and cut off their fractions, as the original programs do.

    Values that differ from an integer only by rounding errors become this integer.
    """
    if values.dtype == np.uint8:
        return values
    return np.clip(values + 4096 * np.finfo(values.dtype).eps, 0, 255).astype(np.uint8)
