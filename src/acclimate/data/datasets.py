"""Domains: labelled pictures of one kind, ready for the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InputError
from .corruptions import Pixels, constants_for, corrupt

Integers = npt.NDArray[np.int64]


class Domain(Protocol):
    """What a stream needs to know of a data set: names, labels, and pictures on demand."""

    name: str
    severity: int | None
    labels: Integers

    def load(self, indices: Integers) -> Tensor:
        """The pictures of these numbers, normalised, (batch, channels, height, width). The same whoever asks, and when."""
        ...


class Images(NamedTuple):
    """Pictures in memory: `pixels` are uint8 (N, height, width, 3), `labels` int64 (N,)."""

    pixels: Pixels
    labels: Integers

    def sample(self, count: int, seed: int = 0) -> Images:
        """`count` of them, drawn without repetition, in their old order."""
        if not 1 <= count <= len(self.labels):
            raise InputError(f"{count} images were asked for: there are {len(self.labels)}; give a number from 1 to that.")
        chosen = np.sort(np.random.default_rng(seed).permutation(len(self.labels))[:count])
        return Images(self.pixels[chosen], self.labels[chosen])


class Corrupted:
    """Pictures in memory under one corruption, or `"clean"`, normalised as the model expects them.

    Args:
        images: The clean pictures.
        name: A corruption, or `"clean"`.
        severity: 1 to 5; None for clean pictures.
        mean: The model's normalisation, as in its timm configuration; so `std`.
        std: See `mean`.
        seed: Of the corruption's randomness; a picture keeps its corruption whatever the order of the stream.
    """

    def __init__(
        self,
        images: Images,
        name: str = "clean",
        severity: int | None = None,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int = 0,
    ) -> None:
        if len(images.pixels) != len(images.labels):
            raise InputError(f"{len(images.pixels)} images have {len(images.labels)} labels: give one label for each.")
        if (name == "clean") != (severity is None):
            raise InputError(
                f"severity={severity!r} for {name!r}: clean images have none, a corruption has one from 1 to 5."
            )
        if severity is not None:
            corrupt(images.pixels[:1], name, severity)  # a wrong name or severity is an error here, not in the stream
        self.name, self.severity, self.labels = name, severity, images.labels
        self._clean, self._seed = images.pixels, seed
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
        self._shown: Pixels | None = None

    def load(self, indices: Integers) -> Tensor:
        if self._shown is None:  # all at once: each picture is met by several methods
            self._shown = (
                self._clean if self.severity is None else corrupt(self._clean, self.name, self.severity, seed=self._seed)
            )
        unit = torch.from_numpy(self._shown[indices]).permute(0, 3, 1, 2) / 255
        return (unit - self._mean) / self._std

    @property
    def constants(self) -> str | None:
        """Whose strengths the corruption has."""
        return None if self.severity is None else constants_for(*self._clean.shape[1:3])

    def __repr__(self) -> str:
        return f"Corrupted({title(self)}, {len(self.labels)} images)"


def title(domain: Domain) -> str:
    """A domain's name and severity in one word."""
    return domain.name if domain.severity is None else f"{domain.name}/{domain.severity}"
