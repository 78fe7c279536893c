"""Domains: labelled pictures of one kind, ready for the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, InputError, require_whole
from .corruptions import Corruption, Integers, Pixels, constants_for


class Domain(Protocol):
    """What a stream needs to know of a data set: names, labels, and pictures on demand."""

    name: str
    severity: int | None
    labels: Integers

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that decides what its pictures and labels are; two domains that share it are the same."""
        ...

    def load(self, indices: Integers) -> Tensor:
        """The pictures of these numbers, normalised, (batch, channels, height, width). The same whoever asks, and when."""
        ...


class Images(NamedTuple):
    """Pictures in memory: `pixels` are uint8 (N, height, width, 3), `labels` int64 (N,), `numbers` those in the data set."""

    pixels: Pixels
    labels: Integers
    numbers: Integers

    def sample(self, count: int, *, skip: int = 0) -> Images:
        """`count` pictures drawn at random, always the same ones; `skip` leaves out the first so many of the draw."""
        if not 1 <= count <= len(self.labels) - skip:
            raise InputError(f"{count} images were asked for: give a number from 1 to {len(self.labels) - skip}.")
        chosen = np.sort(np.random.RandomState(0).permutation(len(self.labels))[skip : skip + count])
        return Images(self.pixels[chosen], self.labels[chosen], self.numbers[chosen])


class Corrupted:
    """Pictures in memory under one corruption, or `"clean"`, normalised as the model expects them.

    Args:
        images: The clean pictures.
        name: A corruption, or `"clean"`.
        severity: 1 to 5; None for clean pictures.
        mean: The model's normalisation, as in its timm configuration; so `std`.
        std: See `mean`.
        constants: How strong a severity is: "imagenet-c" or "cifar-10-c"; by default the pictures' size decides.
        seed: Of the corruption's randomness. A picture keeps its corruption whatever the sample, the stream and the batch.
    """

    def __init__(
        self,
        images: Images,
        name: str = "clean",
        severity: int | None = None,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        constants: str | None = None,
        seed: int = 0,
    ) -> None:
        if not len(images.pixels) == len(images.labels) == len(images.numbers):
            raise InputError(f"{len(images.pixels)} images have {len(images.labels)} labels: give one label for each.")
        if (name == "clean") != (severity is None):
            raise InputError(
                f"severity={severity!r} for {name!r}: clean images have none, a corruption has one from 1 to 5."
            )
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ConfigError(f"mean={mean}, std={std}: give three numbers each, and a deviation above 0.")
        self.name, self.severity, self.labels = name, severity, images.labels
        constants = constants or constants_for(*images.pixels.shape[1:3])
        self._corruption = None if severity is None else Corruption(name, severity, seed, constants)
        self._images = images
        self._mean, self._std = mean, std

    def load(self, indices: Integers) -> Tensor:
        shown = self._images.pixels[indices]
        if self._corruption is not None:
            shown = self._corruption(shown, self._images.numbers[indices])
        return normalised(shown, self._mean, self._std)

    @cached_property
    def identity(self) -> dict[str, Any]:
        content = hashlib.sha256()
        for array in self._images:
            content.update(np.ascontiguousarray(array).data)
        return {
            "images": content.hexdigest()[:16],
            "count": len(self.labels),
            "name": self.name,
            "severity": self.severity,
            "corruption": self._corruption and self._corruption.identity,
            "preprocess": {
                "size": list(self._images.pixels.shape[1:3]),
                "mean": [float(value) for value in self._mean],
                "std": [float(value) for value in self._std],
            },
        }

    def __repr__(self) -> str:
        return f"Corrupted({title(self)}, {len(self.labels)} images)"


class Subset:
    """Some images of a domain, drawn at random, always the same ones for the same number of images.

    Args:
        domain: All of them.
        count: How many.
    """

    def __init__(self, domain: Domain, count: int) -> None:
        require_whole(1, images=count)
        if count > len(domain.labels):
            raise InputError(f"{count} images were asked for: {title(domain)} has {len(domain.labels)}.")
        self._chosen = np.sort(np.random.RandomState(0).permutation(len(domain.labels))[:count])
        self.domain = domain
        self.name, self.severity, self.labels = domain.name, domain.severity, domain.labels[self._chosen]

    @cached_property
    def identity(self) -> dict[str, Any]:
        return {**self.domain.identity, "sampled": len(self.labels)}

    def load(self, indices: Integers) -> Tensor:
        return self.domain.load(self._chosen[indices])

    def __repr__(self) -> str:
        return f"Subset({self.domain!r}, {len(self.labels)})"


def normalised(pixels: Pixels, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (N, height, width, 3) as what a model takes, (N, 3, height, width)."""
    centre, spread = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - centre) / spread


def title(domain: Domain) -> str:
    """A domain's name and severity in one word."""
    return domain.name if domain.severity is None else f"{domain.name}/{domain.severity}"
