"""Replay of corruptions: an image, and its corrupted copies."""

from __future__ import annotations

import re

import numpy as np

from ...data import corruptions
from . import Recording, Result, replays

# The largest allowed difference in grey levels. The originals cut off fractions, so that a rounding error can be one level,
# or two levels if the result of one filter is the input of another.
LEVELS = dict.fromkeys((*corruptions.CORRUPTIONS, *corruptions.EXTRA), 1) | dict.fromkeys(
    ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow", "fog", "elastic_transform", "gaussian_blur"), 2
)
STRAY = 0.002  # share of values that may differ because of the edge detector of spatter


class _RecordedRandom:
    """numpy's `RandomState`, which the recordings use, with the interface of `numpy.random.Generator`.

    Impulse noise was recorded with another generator, which `random` uses.
    """

    def __init__(self, seed: int, seed_of_random: int) -> None:
        legacy = np.random.RandomState(seed)
        self.standard_normal, self.uniform, self.poisson = legacy.standard_normal, legacy.uniform, legacy.poisson
        self.integers = legacy.randint
        self.random = np.random.default_rng(seed_of_random).random


@replays("ImageNet-C corruption formulas")
def _corruptions(recording: Recording) -> Result:
    """Replay every corruption and severity with the recorded random numbers and the recorded crop of ice."""
    result = Result(recording.case)
    hyper = recording.hyper
    other = re.fullmatch(r"numpy default_rng\((\d+)\)", hyper["random_noise_rng"])
    if other is None:
        raise ValueError(f"random_noise_rng={hyper['random_noise_rng']!r} is not supported")
    image = recording.tensors["x/image"].numpy()
    crop = recording.tensors["extra/frost_crop"].numpy()
    recorded = recording.group("final/")
    if recorded.keys() != {f"{name}/{severity}" for name in hyper["corruptions"] for severity in hyper["severities"]}:
        result.problems.append("the images are not those that the header lists")
    worst: dict[str, tuple[float, ...]] = {}
    for case, expected in recorded.items():
        name, severity = case.split("/")
        rng = _RecordedRandom(hyper["numpy_seed"], int(other[1]))
        ours = corruptions.apply(image[None], name, int(severity), [rng], constants="imagenet-c", textures=lambda *_: crop)
        off = abs(ours[0].astype(int) - expected.numpy())
        measured = (float(off.max()), float(off.mean()), float((off > LEVELS[name]).mean()))
        worst[name] = tuple(map(max, worst.get(name, measured), measured))
    for name, (largest, mean, beyond) in worst.items():
        result.levels[name] = f"{largest:.0f}"
        if name == "jpeg_compression":  # depends on the JPEG library
            within, result.levels[name] = mean < 1, f"{largest:.0f} (mean {mean:.2f})"
        elif name == "spatter":
            within, result.levels[name] = beyond < STRAY, f"{largest:.0f} (beyond 1: {beyond:.2%})"
        else:
            within = beyond == 0
        if not within:
            result.problems.append(f"{name}: off by {result.levels[name]}")
    return result
