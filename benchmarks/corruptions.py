"""Milliseconds per image of every corruption, acclimate's beside those of the package `imagecorruptions`, in one run.

    python benchmarks/corruptions.py [--severity 3] [--size 224] [--repeats 7]

Both get the same image, one at a time, and one thread. They are measured in turns, so that a busy moment of the machine
hits both; times are medians, and a ratio is the median of the ratios of neighbouring runs. The last column is acclimate at
28 x 28 pixels in a batch of 256, per image. Without `imagecorruptions` only acclimate is measured. An environment of its own
is best for that package, which brings OpenCV and scikit-image; this file needs neither torch nor timm:

    python -m venv other && other/bin/pip install 'setuptools<80' imagecorruptions
    PYTHONPATH=src other/bin/python benchmarks/corruptions.py
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
import types
from collections.abc import Callable

import numpy as np
import scipy.ndimage

from acclimate.data.corruptions import CORRUPTIONS, EXTRA, corrupt


def reference() -> Callable[..., np.ndarray] | None:
    """`imagecorruptions.corrupt`, made to run with current libraries, whose names for three things it does not know."""
    if "scipy.ndimage.interpolation" not in sys.modules:
        interpolation = types.ModuleType("scipy.ndimage.interpolation")
        interpolation.map_coordinates = scipy.ndimage.map_coordinates
        sys.modules["scipy.ndimage.interpolation"] = interpolation
    if not hasattr(np, "float_"):
        np.float_ = np.float64
    try:
        import cv2
        import imagecorruptions
        import skimage.filters
    except ImportError as error:
        print(f"acclimate alone: {error}")
        return None
    cv2.setNumThreads(1)  # nothing else in either package uses more

    def gaussian(image: np.ndarray, *arguments: object, multichannel: bool = False, **options: object) -> np.ndarray:
        return skimage.filters.gaussian(image, *arguments, channel_axis=-1 if multichannel else None, **options)

    imagecorruptions.corruptions.gaussian = gaussian
    return imagecorruptions.corrupt


def new_image(size: int) -> np.ndarray:
    """Soft stripes with a hard edge and some texture; what is in an image hardly matters for the time."""
    y, x = np.mgrid[:size, :size] / size
    channels = [np.sin(9 * x + 3 * y), np.sin(5 * y - 7 * x * y), np.where(x + y > 1, 0.5, -0.5)]
    texture = np.random.default_rng(0).normal(0, 0.1, (size, size, 3))
    return np.clip(127 + 100 * (np.stack(channels, axis=-1) + texture), 0, 255).astype(np.uint8)


def milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--severity", type=int, default=3)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    severity, size = arguments.severity, arguments.size

    theirs = reference()
    image = new_image(size)
    small = np.repeat(new_image(28)[None], 256, axis=0)
    print(f"severity {severity}, one thread, {arguments.repeats} repeats, numpy {np.__version__}; milliseconds per image\n")
    print(f"{'':20}{'imagecorruptions':>17}{'acclimate':>11}{'ratio':>7}{'28 x 28':>10}")
    all_theirs, all_ours, all_small = [], [], []
    for name in (*CORRUPTIONS, *EXTRA):
        runs: dict[str, Callable[[], object]] = {
            "ours": functools.partial(corrupt, image, name, severity, constants="imagenet-c"),
            "small": functools.partial(corrupt, small, name, severity),
        }
        if theirs is not None:
            runs["theirs"] = functools.partial(theirs, image, corruption_name=name, severity=severity)
        for run in runs.values():
            run()  # fills caches
        taken = [{which: milliseconds(run) for which, run in runs.items()} for _ in range(arguments.repeats)]
        ours = statistics.median(t["ours"] for t in taken)
        per_small = statistics.median(t["small"] for t in taken) / len(small)
        beside = f"{'':17}{ours:11.2f}{'':7}"
        if theirs is not None:
            reference_time = statistics.median(t["theirs"] for t in taken)
            ratio = statistics.median(t["theirs"] / t["ours"] for t in taken)
            beside = f"{reference_time:17.2f}{ours:11.2f}{ratio:7.2f}"
            all_theirs.append(reference_time)
        all_ours.append(ours)
        all_small.append(per_small)
        print(f"{name:20}{beside}{per_small:10.3f}", flush=True)
    mean = statistics.mean(all_ours)
    beside = (
        f"{statistics.mean(all_theirs):17.2f}{mean:11.2f}{statistics.mean(all_theirs) / mean:7.2f}" if all_theirs else ""
    )
    print(f"{'mean':20}{beside or f'{mean:28.2f}       '}{statistics.mean(all_small):10.3f}")


if __name__ == "__main__":
    main()
