"""Domains: labelled images of one kind, ready for the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..core.digests import digest_bytes, digest_json
from ..errors import InputError, require_whole
from .corruptions import Corruption, Integers, Pixels, constants_for
from .preprocess import Preprocess

CLEAN = "clean"  # the name of a domain without a corruption


class DomainKey(NamedTuple):
    """What a domain is called: its name, and the severity of its corruption if it has one."""

    name: str
    severity: int | None = None

    def __str__(self) -> str:
        return self.name if self.severity is None else f"{self.name}/{self.severity}"


class Domain:
    """The base class of all domains. A subclass sets `key` and `labels`, and has `identity` and `load`.

    `preprocess` and `corruption` say how the images are made, where that is known: they are part of the protocol of every
    result, and methods that augment learn the normalisation from them.
    """

    key: DomainKey
    labels: Integers
    preprocess: Preprocess | None = None
    corruption: Corruption | None = None  # made on the fly

    @property
    def identity(self) -> str:
        """Return a digest of all that decides the images and labels; two domains that share it are the same."""
        raise NotImplementedError

    def load(self, indices: Integers) -> Tensor:
        """Return the images of these indices, normalised, (batch, channels, height, width), the same at every call."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key}, {len(self.labels)} images)"


class Images(NamedTuple):
    """Images in memory: `pixels` are uint8 (N, height, width, 3), `labels` int64 (N,), `indices` those in the data set."""

    pixels: Pixels
    labels: Integers
    indices: Integers


class Corrupted(Domain):
    """Images in memory under one corruption, or clean, normalised as the model expects them.

    Args:
        images: The clean images.
        name: A corruption, or "clean".
        severity: 1 to 5; None for clean images.
        mean: The model's normalisation, as in its timm configuration.
        std: The standard deviations of that normalisation.
        constants: How strong a severity is: "imagenet-c" or "cifar-10-c"; by default the size of the images decides.
        seed: Of the corruption's random numbers. An image keeps its corruption in every subset, stream and batch.
    """

    def __init__(
        self,
        images: Images,
        name: str = CLEAN,
        severity: int | None = None,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        constants: str | None = None,
        seed: int = 0,
    ) -> None:
        if not len(images.pixels) == len(images.labels) == len(images.indices):
            raise InputError(f"{len(images.pixels)} images have {len(images.labels)} labels: give one label for each.")
        if (name == CLEAN) != (severity is None):
            raise InputError(
                f"severity={severity!r} for {name!r}: clean images have none, a corruption has one from 1 to 5."
            )
        self.key, self.labels = DomainKey(name, severity), images.labels
        self.preprocess = Preprocess(None, None, tuple(mean), tuple(std))
        constants = constants or constants_for(*images.pixels.shape[1:3])
        self.corruption = None if severity is None else Corruption(name, severity, seed, constants)
        self._images = images

    def load(self, indices: Integers) -> Tensor:
        assert self.preprocess is not None
        shown = self._images.pixels[indices]
        if self.corruption is not None:
            shown = self.corruption(shown, self._images.indices[indices])
        return self.preprocess.normalised(shown)

    @cached_property
    def identity(self) -> str:
        images = digest_bytes(*(np.ascontiguousarray(array).data for array in self._images))
        return digest_json([images, self.key, *how_made(self)])


class Subset(Domain):
    """Some images of a domain.

    Args:
        domain: All of its images.
        chosen: The indices of those that belong to the subset.
    """

    def __init__(self, domain: Domain, chosen: Integers) -> None:
        self.domain, self.chosen = domain, chosen
        self.key, self.labels = domain.key, domain.labels[chosen]
        self.preprocess, self.corruption = domain.preprocess, domain.corruption

    @classmethod
    def sample(cls, domain: Domain, count: int, *, skip: int = 0) -> Subset:
        """Return images drawn at random, always the same ones; `skip` leaves out the first so many of the draw."""
        require_whole(1, images=count)
        if count > len(domain.labels) - skip:
            raise InputError(f"images={count}: {domain.key} has {len(domain.labels) - skip}.")
        drawn = np.random.RandomState(0).permutation(len(domain.labels))
        return cls(domain, np.sort(drawn[skip : skip + count]))

    @cached_property
    def identity(self) -> str:
        return digest_json([self.domain.identity, digest_bytes(self.chosen.astype("<i8").tobytes())])

    def load(self, indices: Integers) -> Tensor:
        return self.domain.load(self.chosen[indices])

    def __repr__(self) -> str:
        return f"Subset({self.domain!r}, {len(self.labels)})"


def how_made(domain: Domain) -> list[object]:
    """Return the preprocessing and the corruption of a domain as JSON holds them, for a digest or a description."""
    return [
        domain.preprocess and domain.preprocess.description(),
        domain.corruption and domain.corruption.description(),
    ]
