"""Images of one colour each: something that a training learns in seconds."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from acclimate.data.domains import Corrupted, Images

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
COLOURS = {"blue": (30, 40, 200), "green": (40, 190, 50), "red": (200, 30, 40)}


def new_images(count=20):
    """Of one colour each, with noise."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(COLOURS)), count)
    plain = np.array(list(COLOURS.values()))[labels][:, None, None] + rng.normal(0, 40, (len(labels), 32, 32, 3))
    return Images(plain.clip(0, 255).astype(np.uint8), labels, np.arange(len(labels)))


def domain(count=20, mean=MEAN):
    return Corrupted(new_images(count), mean=mean, std=STD)


class Interrupting(Corrupted):
    """Asked for images the n-th time, it stops the training."""

    def __init__(self, n):
        super().__init__(new_images(), mean=MEAN, std=STD)
        self.left = n

    def load(self, indices):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().load(indices)


def same(a, b):
    a, b = load_file(a), load_file(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def write_folder(folder):
    """Write the images as files, a folder for each colour."""
    for pixels, label, number in zip(*new_images()):
        (folder / list(COLOURS)[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((40, 48)).save(folder / list(COLOURS)[label] / f"{number}.png")
    return folder
