"""Domains, which are labelled images of one kind, ready for the model."""

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
    """The key of a domain: its name, and the severity of its corruption if it has one."""

    name: str
    severity: int | None = None

    def __str__(self) -> str:
        return self.name if self.severity is None else f"{self.name}/{self.severity}"


class Domain:
    """The base class of all domains. A subclass sets `key` and `labels`, and implements `identity` and `load`.

    `preprocess` and `corruption` say how the images are made, if that is known. They are part of the protocol of every
    result. Methods that augment images get the normalisation from them.
    """

    key: DomainKey
    labels: Integers
    preprocess: Preprocess | None = None
    corruption: Corruption | None = None  # made on the fly

    @property
    def identity(self) -> str:
        """Return a digest of everything that determines the images and labels. Equal domains have equal digests."""
        raise NotImplementedError

    def load(self, indices: Integers) -> Tensor:
        """Return the images of these indices, normalised, (batch, channels, height, width).

        They are the same at every call.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key}, {len(self.labels)} images)"


class Images(NamedTuple):
    """Images in memory.

    `pixels` are uint8 (N, height, width, 3), `labels` are int64 (N,), and `indices` are the indices in the data set.
    """

    pixels: Pixels
    labels: Integers
    indices: Integers


class Corrupted(Domain):
    """A domain of images in memory, clean or with one corruption, normalised as the model expects.

    Args:
        images: The clean images.
        name: The name of a corruption, or "clean".
        severity: A severity from 1 to 5; None for clean images.
        mean: The mean of the model's normalisation, as in its timm configuration.
        std: The standard deviation of the model's normalisation, as in its timm configuration.
        constants: The strengths of the severities: "imagenet-c" or "cifar-10-c". Default: chosen by the size of the images.
        seed: The seed of the corruption. An image has the same corruption in every subset, stream and batch.
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
        """Return the images of these indices, corrupted and normalised, (batch, channels, height, width)."""
        assert self.preprocess is not None
        shown = self._images.pixels[indices]
        if self.corruption is not None:
            shown = self.corruption(shown, self._images.indices[indices])
        return self.preprocess.normalised(shown)

    @cached_property
    def identity(self) -> str:
        """Return a digest of the clean images, the labels, the corruption and the normalisation."""
        images = digest_bytes(*(np.ascontiguousarray(array).data for array in self._images))
        return digest_json([images, self.key, *describe_preparation(self)])


class Subset(Domain):
    """A domain that consists of some images of another domain.

    Args:
        domain: The other domain.
        chosen: The indices of the images in it.
    """

    def __init__(self, domain: Domain, chosen: Integers) -> None:
        self.domain, self.chosen = domain, chosen
        self.key, self.labels = domain.key, domain.labels[chosen]
        self.preprocess, self.corruption = domain.preprocess, domain.corruption

    @classmethod
    def sample(cls, domain: Domain, count: int, *, skip: int = 0) -> Subset:
        """Return `count` images drawn at random, always the same ones.

        The first `skip` images of the draw are left out.
        """
        require_whole(1, images=count)
        if count > len(domain.labels) - skip:
            raise InputError(f"images={count}: {domain.key} has {len(domain.labels) - skip}.")
        drawn = np.random.RandomState(0).permutation(len(domain.labels))
        return cls(domain, np.sort(drawn[skip : skip + count]))

    @cached_property
    def identity(self) -> str:
        """Return a digest of the other domain and the chosen indices."""
        return digest_json([self.domain.identity, digest_bytes(self.chosen.astype("<i8").tobytes())])

    def load(self, indices: Integers) -> Tensor:
        """Return the images of these indices of the subset, (batch, channels, height, width)."""
        return self.domain.load(self.chosen[indices])

    def __repr__(self) -> str:
        return f"Subset({self.domain!r}, {len(self.labels)})"


def describe_preparation(domain: Domain) -> list[object]:
    """Return the preprocessing and the corruption of a domain as values for JSON."""
    return [
        domain.preprocess and domain.preprocess.description(),
        domain.corruption and domain.corruption.description(),
    ]
