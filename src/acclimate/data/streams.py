"""Streams of batches, in the settings of the literature.

A setting is a name for the order and the size of the batches. Names can be joined by a plus sign.

| setting | the stream |
|---|---|
| `normal` | one domain, shuffled |
| `bs1` | one image at a time |
| `label-shift` | one class after another is the most frequent, as in SAR |
| `mixed` | all domains, shuffled together |
| `continual` | one domain after another; the model is not told when the domain changes |
| `gradual` | as `continual`; the severity of each corruption rises from 1 to 5 and falls back to 1 |

`label-shift` and `bs1` can be joined with each of the others: `continual+label-shift`, `mixed+bs1`.

The order depends only on the seed, the domains and the setting, and not on the method or the number of workers, so that two
methods get the same batches. In `label-shift` the order is the same in every domain, as in SAR.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from os import PathLike, fspath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..core.processes import end_with_parent
from ..errors import AcclimateError, ConfigError, InputError, require_between, require_whole
from .corruptions import Integers
from .domains import Domain, DomainKey

SETTINGS = ("normal", "bs1", "label-shift", "mixed", "continual", "gradual")
ARRANGEMENTS = ("mixed", "continual", "gradual")
SAR_RATIOS = (1, 1000, 2000, 3000, 4000, 5000, 500_000)
SAR_DIGESTS = {  # digests of the authors' files for 1000 classes of 50 images, ratio 500000
    "9bdb3e88c3efd6b1d6bb3f0f3f26d7bf5f9215f029a05e81fa7c4a13b79972e6": 2021,
    "659082b354831f34db5ed0b05b7778cc05aa6a8725d99d26d1de105ecafe6060": 2022,
    "4c53bb0caa8252f855f8dba76fbc0dd812ff484789e6c418c774bb4d654bda4b": 2023,
}


class Batch(NamedTuple):
    """A batch of images, with their labels and domains.

    `domain` contains, for each image, the position of its domain in the list `domains` of the stream.
    """

    images: Tensor
    labels: Tensor
    domain: Tensor


class Stream:
    """A stream of batches of (images, labels, domain), in an order that is the same for every method.

    Args:
        domains: One domain, or several for `mixed`, `continual` and `gradual`.
        setting: One of `SETTINGS`, or several joined by a plus sign.
        batch_size: The number of images in a batch; 1 in `bs1`.
        seed: The seed of the order.
        ratio: In `label-shift`, the ratio between the probabilities of the dominating class and of any other class.
        order: In `label-shift` with one domain, the authors' index file (`.npy`), or such an array, instead of a seed.
        workers: The number of processes that load images in advance; 0 loads them in this process.
    """

    def __init__(
        self,
        domains: Domain | Iterable[Domain],
        setting: str = "normal",
        *,
        batch_size: int = 64,
        seed: int = 2021,
        ratio: float = 500_000,
        order: str | PathLike[str] | Sequence[int] | Integers | None = None,
        workers: int = 0,
    ) -> None:
        self.domains: list[Domain] = list(domains) if isinstance(domains, Iterable) else [domains]
        self.setting = canonical_setting(setting)
        require_whole(1, batch_size=batch_size)
        require_whole(0, seed=seed, workers=workers)
        require_between(1, 1e12, ratio=ratio)
        self.batch_size = 1 if "bs1" in self.setting else int(batch_size)
        self.seed, self.ratio, self.workers = int(seed), ratio, workers
        if not self.domains:
            raise ConfigError("A stream needs at least one domain.")
        titles = [str(domain.key) for domain in self.domains]
        if len(set(titles)) < len(titles):
            raise ConfigError(f"Two domains have the same name ({', '.join(titles)}): their scores could not be told apart.")
        labels = [_checked_labels(domain) for domain in self.domains]
        self._labels = np.concatenate(labels)
        self._starts = np.cumsum([0, *map(len, labels)])
        self._given = None if order is None else self._read(order)
        self._parts = [self._order(visit, number) for number, visit in enumerate(self._visits())]

    # ---- order ------------------------------------------------------------------------------------------------

    def _visits(self) -> list[list[int]]:
        """Return the positions of the domains of each visit. The domains of a visit are mixed."""
        everything = range(len(self.domains))
        if "mixed" in self.setting:
            return [list(everything)]
        if "continual" in self.setting:
            return [[i] for i in everything]
        if "gradual" in self.setting:
            where = {domain.key: i for i, domain in enumerate(self.domains)}
            names = dict.fromkeys(domain.key.name for domain in self.domains)
            missing = [str(key) for name in names for s in range(1, 6) if (key := DomainKey(name, s)) not in where]
            if missing:
                raise ConfigError(
                    f"gradual goes through severities 1 to 5 of each corruption: {', '.join(missing)} missing."
                )
            return [[where[DomainKey(name, s)]] for name in names for s in (1, 2, 3, 4, 5, 4, 3, 2, 1)]
        if len(self.domains) != 1:
            raise ConfigError(
                f"{self.setting} is a stream of one domain, {len(self.domains)} were given: make one stream for each, or "
                f"add {', '.join(ARRANGEMENTS[:-1])} or {ARRANGEMENTS[-1]} to the setting."
            )
        return [[0]]

    def _order(self, visit: list[int], number: int) -> Integers:
        """Return the order of the images of one visit, as positions in the list of the images of all domains."""
        positions = np.concatenate([np.arange(self._starts[i], self._starts[i + 1]) for i in visit])
        if self._given is not None:
            return positions[self._given]
        if "label-shift" in self.setting:
            return positions[label_shift(self._labels[positions], seed=self.seed, ratio=self.ratio)]
        key = "|".join([str(self.seed), self.setting, str(number), *(str(self.domains[i].key) for i in visit)])
        # numpy guarantees that RandomState draws the same numbers in all versions
        rng = np.random.RandomState(np.frombuffer(hashlib.sha256(key.encode()).digest(), "<u4"))
        return positions[rng.permutation(len(positions))]

    def _read(self, order: str | PathLike[str] | Sequence[int] | Integers) -> Integers:
        if "label-shift" not in self.setting or len(self.domains) != 1:
            raise ConfigError("order= is the index file of a label-shift stream of one domain; it fits no other setting.")
        what, indices = "order", np.asarray(order)
        if isinstance(order, (str, PathLike)):
            what = fspath(order)
            try:
                with open(what, "rb") as file:
                    indices = np.lib.format.read_array(file, allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise InputError(f"{what} cannot be read as a numpy array of indices (.npy): {error}") from None
        count = len(self._labels)
        whole = indices.dtype.kind in "iu" and indices.size > 0
        if not whole or indices.ndim != 1 or indices.min() < 0 or indices.max() >= count:
            found = f"{indices.dtype} {indices.shape}" + (f" from {indices.min()} to {indices.max()}" if whole else "")
            raise InputError(f"{what} does not fit: expected a list of indices from 0 to {count - 1}, got {found}.")
        indices = indices.astype(np.int64)
        if _digest(indices) in SAR_DIGESTS and not np.array_equal(self._labels, np.repeat(np.arange(1000), 50)):
            raise InputError(
                f"{what} is SAR's order of ImageNet-C's images sorted by class, 50 of each; this domain is not."
            )
        return indices

    @property
    def order(self) -> Integers:
        """The images of the stream, as positions in the list of the images of all domains, one domain after another."""
        return np.concatenate(self._parts)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the order. Streams with equal digests show the same images in the same order."""
        return _digest(self.order)

    def map_domains(self, view: Callable[[Domain], Domain]) -> Stream:
        """Return a stream of the same images in the same order, with every domain replaced by `view(domain)`.

        `view` must keep the key and the labels of a domain.
        """
        shown = [view(domain) for domain in self.domains]
        if all(mine is other for mine, other in zip(self.domains, shown)):
            return self  # keeps the cached digest of the order
        other = copy(self)
        other.domains = shown
        return other

    # ---- batches ----------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """The number of images in the stream, including repetitions."""
        return sum(map(len, self._parts))

    def __len__(self) -> int:
        """Return the number of batches. A batch never contains images of two successive domains."""
        return sum(-(-len(part) // self.batch_size) for part in self._parts)

    def __iter__(self) -> Iterator[Batch]:
        return self.since(0)

    def since(self, done: int) -> Iterator[Batch]:
        """Yield the batches after the first `done` ones, which are not loaded."""
        batches = [part[i : i + self.batch_size] for part in self._parts for i in range(0, len(part), self.batch_size)]
        loader: DataLoader[Any] = DataLoader(
            self,  # type: ignore[arg-type]  # a loader uses nothing but __getitems__
            batch_sampler=batches[done:],  # type: ignore[arg-type]
            num_workers=self.workers,
            collate_fn=_as_it_is,
            worker_init_fn=end_with_parent,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # otherwise the loader would draw from torch's global generator
        )
        try:
            for batch in loader:
                if isinstance(batch, AcclimateError):
                    raise batch
                yield batch
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            raise AcclimateError(
                "A process that loads images was killed. Memory may be short: give fewer workers, or 0, which loads in this "
                "process."
            ) from error

    def __getitems__(self, positions: Integers) -> Batch | AcclimateError:
        """Return one batch, given positions as in `order`, or the error that says why it cannot be loaded.

        An error that is raised in another process would reach the user as torch's traceback of many lines.
        """
        try:
            return self._batch(positions)
        except AcclimateError as error:
            return error

    def _batch(self, positions: Integers) -> Batch:
        domain = np.searchsorted(self._starts, positions, side="right") - 1
        images: Tensor | None = None
        for i in np.unique(domain):
            mine = np.flatnonzero(domain == i)
            loaded = self.domains[i].load(positions[mine] - self._starts[i])
            images = loaded.new_empty(len(positions), *loaded.shape[1:]) if images is None else images
            images[torch.from_numpy(mine)] = loaded
        assert images is not None
        return Batch(images, torch.from_numpy(self._labels[positions]), torch.from_numpy(domain))

    @property
    def description(self) -> str:
        """A description of the stream in one line."""
        names = [str(domain.key) for domain in self.domains]
        shown = ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)} domains)"
        size = "1 image" if self.batch_size == 1 else f"up to {self.batch_size} images"
        return f"{self.setting}: {shown}; {self.samples} images in {len(self)} batches of {size}; {self._origin()}"

    def _origin(self) -> str:
        if "label-shift" not in self.setting:
            return f"seed {self.seed}"
        if self._given is not None:
            known = SAR_DIGESTS.get(self.digest)
            return "order as given" + (f", SAR's of seed {known}" if known else "")
        origin = f"imbalance ratio {self.ratio:g}, seed {self.seed}"
        counts = np.bincount(self._labels)
        if (len(self.domains), len(counts), self.seed) == (1, 1000, 2021) and (counts == 50).all():
            origin += " (not SAR's order of that seed, which exists as their file only: give it with order=)"
        return origin

    def __repr__(self) -> str:
        return f"<Stream {self.description}>"


def label_shift(labels: Integers, *, seed: int, ratio: float = 500_000) -> Integers:
    """Return the indices of a stream in which one class after another dominates, drawn as by SAR's authors.

    Each class dominates for twice as many steps as a class has images. In these steps, the label is `ratio` times as likely
    to be this class as any other class. The image is drawn from all images of its label, with repetition. For 1000 classes
    of 50 images, the result equals the authors' files of the seeds 2022 and 2023 bit for bit.

    Args:
        labels: The label of every image.
        seed: The seed of the order in which the classes dominate. All else is drawn with the single seed of the authors.
        ratio: The ratio between the probabilities of the dominating class and of any other class.
    """
    present, labels = np.unique(labels, return_inverse=True)
    count = len(present)
    shuffler = random.Random(seed)
    # The authors shuffle once for each ratio: 500000 has the seventh shuffle. Any other ratio gets the eighth (our choice).
    for studied in (*SAR_RATIOS, ratio):
        classes = list(range(count))
        shuffler.shuffle(classes)
        if studied == ratio:
            break
    steps = round(2 * len(labels) / count)
    draws = np.random.RandomState(2022)
    chance = draws.random_sample((count, steps))
    minor = 1 / (ratio + count - 1)
    shown = np.empty((count, steps), np.int64)
    for turn, dominating in enumerate(classes):
        p = np.full(count, minor)
        p[dominating] = ratio * minor
        shown[turn] = _choice(chance[turn], p)
    flat = shown.ravel()
    indices = np.empty(len(flat), np.int64)
    for i in range(count):
        when = np.flatnonzero(flat == i)
        if len(when):
            images = np.flatnonzero(labels == i)
            indices[when] = images[draws.randint(0, len(images), len(when))]
    return indices


def _digest(order: Integers) -> str:
    return hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()


def _choice(chance: npt.NDArray[np.float64], p: npt.NDArray[np.float64]) -> Integers:
    """Return what `numpy.random.choice(len(p), 1, p=p)` returns for each uniform random number."""
    cumulated = p.cumsum()
    return (cumulated / cumulated[-1]).searchsorted(chance, side="right")


def canonical_setting(setting: str) -> str:
    """Return the name of a setting with its parts in their usual order, and refuse one that does not exist."""
    parts = str(setting).split("+")
    unknown = [part for part in parts if part not in SETTINGS]
    if unknown:
        raise ConfigError(f"Unknown setting {unknown[0]!r}. Known: {', '.join(SETTINGS)}, and several joined by +.")
    arrangements = [part for part in parts if part in ARRANGEMENTS]
    if len(arrangements) > 1 or len(set(parts)) < len(parts) or ("normal" in parts and len(parts) > 1):
        raise ConfigError(
            f"setting={setting!r}: join at most one of {', '.join(ARRANGEMENTS)} with label-shift and bs1, each once."
        )
    return "+".join(sorted(parts, key=lambda part: SETTINGS.index(part) if part not in ARRANGEMENTS else -1))


def _checked_labels(domain: Domain) -> Integers:
    labels = np.asarray(domain.labels)
    if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in "iu":
        raise InputError(f"{domain.key} has labels {labels.dtype} {labels.shape}: give one whole number for each image.")
    if labels.min() < 0:
        raise InputError(f"{domain.key}: image {int(labels.argmin())} has the label {labels.min()}; labels begin at 0.")
    return labels.astype(np.int64)


def _as_it_is(batch: Any) -> Any:
    return batch
