"""The image filters that corruptions consist of, in numpy.

Convolutions are sums of whole shifted images in a fixed order. The result for a pixel therefore does not depend on the batch
or on the number of threads, which a matrix product does not guarantee.

The first dimension of images and layers is the batch: (N, height, width) or (N, height, width, channels).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.fft
from scipy import ndimage

Array = npt.NDArray[Any]


def pad(x: Array, axis: int, before: int, after: int, border: Any) -> Array:
    """Pad an array along one axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, after)
    return np.pad(x, widths, mode=border)


def gaussian(x: Array, sigma: float | tuple[float, float], *, truncate: float = 4.0, border: str = "edge") -> Array:
    """Blur images with a Gaussian along height and width."""
    sigmas = sigma if isinstance(sigma, tuple) else (sigma, sigma)
    for axis, s in zip((1, 2), sigmas):
        radius = int(truncate * s + 0.5)
        if radius == 0:
            continue
        weights = np.exp(-0.5 * (np.arange(radius + 1) / s) ** 2)
        weights /= weights[0] + 2 * weights[1:].sum()
        wide = np.moveaxis(pad(x, axis, radius, radius, border), axis, 0)
        blurred = np.moveaxis(x, axis, 0) * x.dtype.type(weights[0])
        pair = np.empty_like(blurred)
        size = x.shape[axis]
        for k in range(1, radius + 1):
            np.add(wide[radius - k :][:size], wide[radius + k :][:size], out=pair)
            pair *= x.dtype.type(weights[k])
            blurred += pair
        x = np.moveaxis(blurred, 0, axis)
    return x


def motion_blur(x: Array, radius: int, sigma: float, angle: float) -> Array:
    """Blur one image or layer, without a batch, along a line at an angle in degrees.

    The weights along the line are one half of a Gaussian.
    """
    height, width = x.shape[:2]
    taps = np.arange(2 * radius + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    weights /= weights.sum()
    turn = math.radians(angle)
    rows = np.ceil(taps * math.sin(turn) - 0.5).astype(int)
    columns = np.ceil(taps * math.cos(turn) - 0.5).astype(int)
    inside = (abs(rows) < height) & (abs(columns) < width)
    rows, columns = rows[inside], columns[inside]  # always a prefix, because the taps only move away from the image
    top, left = max(0, -rows.min()), max(0, -columns.min())
    wide = pad(x, 0, top, max(0, rows.max()), "edge")
    wide = pad(wide, 1, left, max(0, columns.max()), "edge")
    blurred, tap = np.zeros_like(x), np.empty_like(x)
    for weight, row, column in zip(weights, rows + top, columns + left):
        np.multiply(wide[row : row + height, column : column + width], x.dtype.type(weight), out=tap)
        blurred += tap
    return blurred


def clipped_zoom(x: Array, factor: float) -> Array:
    """Crop the centre of images and enlarge it, linearly, to the original size or one pixel more.

    The outermost pixels of the crop remain the outermost pixels of the result.
    """
    for axis in (1, 2):
        crop = math.ceil(x.shape[axis] / factor)
        start = (x.shape[axis] - crop) // 2
        size = round(crop * factor)
        position = np.arange(size) * ((crop - 1) / max(1, size - 1))
        low = np.minimum(position.astype(int), max(0, crop - 2))
        share = (position - low).astype(x.dtype).reshape(-1, *[1] * (x.ndim - axis - 1))
        near = np.take(x, start + low, axis)
        far = np.take(x, start + np.minimum(low + 1, crop - 1), axis)
        far -= near
        far *= share
        x = np.add(near, far, out=near)
    return x


@functools.lru_cache(maxsize=64)
def disk(radius: float, softness: float) -> Array:
    """Return the kernel of a defocus blur: a disk with a softened edge."""
    reach = max(8, math.ceil(radius))
    steps = np.arange(-reach, reach + 1)
    kernel = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(np.float64)
    kernel /= kernel.sum()
    half = 1 if radius <= 8 else 2
    weights = np.exp(-0.5 * (np.arange(-half, half + 1) / softness) ** 2)
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, weights / weights.sum(), axis, mode="mirror")
    used = int(abs(steps[kernel.any(axis=0)]).max())
    return kernel[reach - used : reach + used + 1, reach - used : reach + used + 1].astype(np.float32)


def convolve(x: Array, kernel: Array) -> Array:
    """Convolve one image, without a batch, with a symmetric kernel, by a Fourier transform."""
    reach = len(kernel) // 2
    height, width = x.shape[:2]
    wide = np.pad(np.moveaxis(x, -1, 0), ((0, 0), (reach, reach), (reach, reach)), mode="reflect")
    size = [scipy.fft.next_fast_len(side, real=True) for side in wide.shape[1:]]
    spectrum = scipy.fft.rfft2(wide, size)
    spectrum *= scipy.fft.rfft2(kernel, size)
    out = scipy.fft.irfft2(spectrum, size, overwrite_x=True)
    # values that wrap around are in the first rows and columns, which are cut off
    return np.moveaxis(out[:, 2 * reach :][:, :height, 2 * reach :][..., :width], 0, -1)


def sample(image: Array, rows: Array, columns: Array) -> Array:
    """Return bilinear values of one image, without a batch, at fractional positions.

    The image is mirrored beyond its edges.
    """

    def mirrored(index: Array, size: int) -> Array:
        index = index % (2 * size)
        return np.minimum(index, 2 * size - 1 - index)

    height, width, channels = image.shape
    pixels = image.reshape(-1, channels)
    top, left = np.floor(rows), np.floor(columns)
    down = (rows - top).astype(image.dtype)[..., None]
    right = (columns - left).astype(image.dtype)[..., None]
    top, left = top.astype(np.intp), left.astype(np.intp)
    above, below = (mirrored(i, height) * width for i in (top, top + 1))
    before, after = (mirrored(i, width) for i in (left, left + 1))

    def along(row: Array) -> Array:
        a, b = pixels.take(row + before, axis=0), pixels.take(row + after, axis=0)
        b -= a
        b *= right
        return np.add(a, b, out=a)

    upper, lower = along(above), along(below)
    lower -= upper
    lower *= down
    return np.add(upper, lower, out=upper)


def plasma(draws: Array, size: int, decay: float) -> Array:
    """Return clouds with values from 0 to 1, made by the diamond-square algorithm on a torus.

    Args:
        draws: Random numbers between -1 and 1, (N, size * size - 1).
        size: The side of the square, a power of two.
        decay: The factor by which the roughness decreases from one scale to the next.
    """
    clouds = np.zeros((len(draws), size, size))
    step, roughness, used = size, 100.0, 0

    def wobble(total: Array) -> Array:
        nonlocal used
        count = total[0].size
        drawn = draws[:, used : used + count].reshape(total.shape)
        used += count
        return total / 4 + roughness**2 * drawn

    while step >= 2:
        half = step // 2
        corners = clouds[:, ::step, ::step]
        total = corners + np.roll(corners, -1, 1)
        centres = wobble(total + np.roll(total, -1, 2))
        clouds[:, half::step, half::step] = centres
        clouds[:, ::step, half::step] = wobble(centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 2))
        clouds[:, half::step, ::step] = wobble(centres + np.roll(centres, 1, 2) + corners + np.roll(corners, -1, 1))
        step, roughness = half, roughness / decay
    clouds -= clouds.min((1, 2), keepdims=True)
    return clouds / clouds.max((1, 2), keepdims=True)


def box(x: Array) -> Array:
    """Return the mean of each 3 x 3 neighbourhood."""
    for axis in (1, 2):
        size = x.shape[axis]
        wide = np.moveaxis(pad(x, axis, 1, 1, "reflect"), axis, 0)
        x = np.moveaxis(wide[:size] + wide[1:-1] + wide[2:], 0, axis)
    return x * np.float32(1 / 9)


def edges(layers: Array, low: int, high: int) -> Array:
    """Return the edges of uint8 layers according to Canny.

    They are ridges of the gradient above `low` that are connected to a ridge above `high`.
    """
    wide = np.pad(layers.astype(np.int16), ((0, 0), (1, 1), (1, 1)), mode="edge")
    smooth = wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:]
    across = smooth[:, :, 2:] - smooth[:, :, :-2]
    smooth = wide[:, :, :-2] + 2 * wide[:, :, 1:-1] + wide[:, :, 2:]
    down = smooth[:, 2:] - smooth[:, :-2]

    strength = np.pad(abs(across) + abs(down), ((0, 0), (1, 1), (1, 1)))
    above = strength > low
    candidates = np.flatnonzero(above)
    peak = strength.ravel()[candidates]
    across, down = across[above[:, 1:-1, 1:-1]], down[above[:, 1:-1, 1:-1]]
    slope = np.float32(math.tan(math.pi / 8))
    level = abs(down) < slope * abs(across)
    steep = abs(down) > (2 + slope) * abs(across)
    # a ridge is higher than its two neighbours across it; these are offsets in memory to such neighbours
    row = strength.shape[2]
    step = np.where(level, 1, np.where(steep, row, np.where((across ^ down) < 0, row - 1, row + 1)))
    before, after = strength.ravel()[candidates - step], strength.ravel()[candidates + step]
    ridge = np.zeros(strength.shape, bool)
    ridge.ravel()[candidates] = (peak > before) & ((peak > after) | ((peak == after) & (level | steep)))
    in_plane = np.zeros((3, 3, 3), bool)
    in_plane[1] = True
    lines, count = ndimage.label(ridge, in_plane)
    strong = np.zeros(count + 1, bool)
    strong[lines[ridge & (strength > high)]] = True
    return strong[lines[:, 1:-1, 1:-1]]


def chamfer_distance(points: Array, limit: int) -> Array:
    """Return the distance of each pixel to the nearest point, up to a limit of at most 20.

    Paths consist of the moves of a king and of a knight in chess. The moves of a shortest path may be made in any order, so
    the directions are tried one after another, each with 1, 2, 4, ... moves at once.
    """
    unit = 1290  # lengths are 16-bit integers in this unit, which are fast to compare
    straight, diagonal, knight = unit, round(1.4 * unit), round(2.1969 * unit)
    moves = [(0, 1, straight), (1, 0, straight), (1, 1, diagonal), (1, -1, diagonal)]
    moves += [(1, 2, knight), (2, 1, knight), (1, -2, knight), (2, -1, knight)]
    distance = np.where(points, np.uint16(0), np.uint16(limit * unit))
    for row, column, length in moves:
        for sign in (1, -1):
            times = 1
            while times * length < limit * unit:
                start, end = _ends(distance, sign * times * row, sign * times * column)
                np.minimum(end, start + np.uint16(times * length), out=end)
                times *= 2
    return distance * np.float32(1 / unit)


def _ends(layers: Array, row: int, column: int) -> tuple[Array, Array]:
    """Return the parts of layers in which a move can start, and the parts in which it ends."""
    height, width = layers.shape[1:]
    start = layers[:, max(0, -row) : max(0, height - row), max(0, -column) : max(0, width - column)]
    end = layers[:, max(0, row) : max(0, height + row), max(0, column) : max(0, width + column)]
    return start, end


def equalise(layers: Array) -> Array:
    """Equalise the histogram of each uint8 layer. Its darkest level becomes 0."""
    out = np.empty_like(layers)
    for i, layer in enumerate(layers):
        counts = np.bincount(layer.ravel(), minlength=256)
        lowest = counts[int(layer.min())]
        if lowest == layer.size:  # the layer has a single level
            out[i] = layer
        else:
            spread = np.float32(255 / (layer.size - lowest))
            out[i] = np.rint((counts.cumsum() - lowest).clip(0) * spread).astype(np.uint8)[layer]
    return out
