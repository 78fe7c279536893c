"""Hostile streams, on which adaptation may do harm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..core.digests import digest_json
from ..errors import ConfigError
from .corruptions import Integers
from .domains import CLEAN, Domain, DomainKey
from .preprocess import Preprocess
from .streams import Stream

JUNK = ("noise", "black")
FIRST = 256  # junk images at the beginning of a stream
TURN = 10  # images of a domain, before another one has its turn


class Junk(Domain):
    """Images that show nothing: noise of random grey levels, or black.

    They have a label, because a stream needs one, but no prediction of them is right.

    Args:
        kind: "noise" or "black".
        count: The number of images.
        shape: The shape of an image, (channels, height, width).
        preprocess: The preprocessing of the other images of the stream.
    """

    def __init__(self, kind: str, count: int, shape: tuple[int, ...], preprocess: Preprocess | None) -> None:
        if kind not in JUNK:
            raise ConfigError(f"kind={kind!r}: choose {' or '.join(JUNK)}.")
        self.key, self.labels, self.preprocess = DomainKey(kind), np.zeros(count, np.int64), preprocess
        self._shape = shape

    @property
    def identity(self) -> str:
        """Return a digest of everything that determines the images."""
        return digest_json([self.key, len(self.labels), list(self._shape)])

    def load(self, indices: Integers) -> Tensor:
        """Return the images of these indices."""
        channels, height, width = self._shape
        pixels = np.zeros((len(indices), height, width, channels), np.uint8)
        if self.key.name == "noise":
            for row, index in enumerate(indices):
                pixels[row] = np.random.RandomState(int(index)).randint(0, 256, pixels.shape[1:])
        if self.preprocess is not None:
            return self.preprocess.normalised(pixels)
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


class HostileStream(Stream):
    """A stream whose images come in a given order.

    Args:
        name: The name of the stream, which is its setting in results.
        domains: The domains.
        order: The images, as positions in the list of the images of all domains.
        batch_size: The number of images in a batch.
    """

    def __init__(
        self, name: str, domains: Sequence[Domain], order: Sequence[int] | Integers, *, batch_size: int = 64
    ) -> None:
        super().__init__(domains, "mixed", batch_size=batch_size, seed=0)
        self.setting = name
        self._parts = [np.asarray(order, np.int64)]


def hostile_streams(domains: Sequence[Domain], *, batch_size: int = 64) -> Iterator[HostileStream]:
    """Yield hostile streams of some domains, of which the first one that is not clean is shown in most of them.

    Args:
        domains: Domains of equal images, of which at least one is a shift. Clean images may be among them.
        batch_size: The number of images in a batch, where it is not 1.
    """
    shifts = [domain for domain in domains if domain.key.name != CLEAN]
    if not shifts:
        raise ConfigError("Hostile streams need at least one shift: give corruptions.")
    shape = tuple(shifts[0].load(np.arange(1)).shape[1:])
    rng = np.random.RandomState(0)
    first = shifts[0]
    count, labels = len(first.labels), np.asarray(first.labels)
    shuffled = rng.permutation(count)
    by_class = np.argsort(labels, kind="stable")
    common = np.flatnonzero(labels == np.bincount(labels).argmax())

    for domain in domains:
        yield HostileStream(f"shuffled {domain.key}", [domain], rng.permutation(len(domain.labels)), batch_size=batch_size)
    yield HostileStream("sorted by class", [first], by_class, batch_size=batch_size)
    yield HostileStream(
        "one class first", [first], [*np.resize(common, FIRST), *shuffled[: count - FIRST // 2]], batch_size=batch_size
    )
    for kind in JUNK:
        junk = Junk(kind, FIRST, shape, first.preprocess)
        yield HostileStream(f"{kind} first", [junk, first], [*range(FIRST), *(FIRST + shuffled)], batch_size=batch_size)
    yield HostileStream("single images", [first], shuffled[: count // 2], batch_size=1)  # they take long
    if len(domains) > 1:
        starts = np.cumsum([0, *(len(domain.labels) for domain in domains)])
        orders = [start + rng.permutation(len(domain.labels)) for start, domain in zip(starts, domains)]
        turns = [order[i : i + TURN] for i in range(0, count, TURN) for order in orders]
        yield HostileStream("alternating", domains, np.concatenate(turns)[:count], batch_size=batch_size)
    each = count // 8
    useless = [Junk(kind, each, shape, first.preprocess) for kind in JUNK]
    parts = np.array_split(len(JUNK) * each + by_class, each)
    order = [i for turn, part in enumerate(parts) for i in (turn, each + turn, *part)]
    yield HostileStream("adversarial mix", [*useless, first], order, batch_size=batch_size)
