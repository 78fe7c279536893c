"""The subject of a figure: a testbed, and the images of it that are adapted to and shown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from torch import Tensor, nn

from .. import __version__
from ..core.adapter import Adapter
from ..data.catalog import SEVERITY, Data, Selection
from ..data.corruptions import Pixels
from ..data.disk import Files
from ..data.domains import CLEAN, Domain, DomainKey, Subset
from ..data.folder import find_images
from ..data.preprocess import Preprocess, input_of
from ..data.streams import Stream
from ..errors import ConfigError, InputError, require_between, shorten_list
from ..evaluation.spec import describe
from ..evaluation.testbed import Testbed
from ..models.normalisation import Normalisation
from .intervals import Adaptation

BATCH = 64
IMAGES = 512  # of each domain at most, unless more are asked for
Item = TypeVar("Item")


@dataclass(frozen=True)
class Subject:
    """What every figure starts from. The model of the testbed is never adapted; what adapts is a copy.

    Args:
        testbed: The source model and the data.
        images: Of each domain so many at most, the same ones in all.
        clean: A folder of clean images, `<wnid>/*.JPEG`, for data that has corrupted images alone.
        runs: Where the runs that a figure needs are kept; None keeps nothing.
        console: Where progress is shown.
    """

    testbed: Testbed
    images: int = IMAGES
    clean: Path | None = None
    runs: Path | None = None
    console: Console = field(default_factory=lambda: Console(quiet=True))

    @property
    def model(self) -> nn.Module:
        """Return the source model."""
        return self.testbed.model

    @property
    def data(self) -> Data:
        """Return the data."""
        return self.testbed.data

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return next(self.model.parameters()).device

    @property
    def labelled(self) -> bool:
        """Return whether the labels of the images mean anything."""
        return self.data.num_classes > 1

    @cached_property
    def count(self) -> int:
        """Return the number of images in each domain."""
        return min(self.images, len(self.data.domains[0].labels))

    @cached_property
    def origin(self) -> dict[str, str]:
        """Return what identifies the model and the data."""
        known = describe(self.model, self.testbed.name)
        return {"model": known["name"], **{key: known[key] for key in ("weights", "architecture")}, "data": self.data.name}

    # ---- images ---------------------------------------------------------------------------------------------------

    def severity(self, given: int | None) -> int:
        """Return a severity that was asked for, or that at which the model is hurt and not lost."""
        require_between(1, 5, optional=True, severity=given)
        return self.data.severity if given is None else given

    def domain(self, name: str = CLEAN, severity: int | None = None) -> Domain:
        """Return the images under a corruption, or clean: the same images, whatever the domain."""
        first = self.data.domains[0]
        on_disk = first.key.severity is not None and first.corruption is None
        if name == CLEAN and on_disk:
            return self._originals(self._taken(first))
        found = self._taken(self.data.domain(name, None if name == CLEAN else self.severity(severity)))
        if on_disk and _files(found) != _files(self._taken(first)):
            raise InputError(f"{found.key} and {first.key} do not have the same images: figures compare image with image.")
        return found

    def batch(self, name: str = CLEAN, severity: int | None = None, *, count: int | None = None) -> Tensor:
        """Return the first so many images, or all, as the model takes them, on its device."""
        number = self.count if count is None else min(count, self.count)
        return self.domain(name, severity).load(np.arange(number)).to(self.device)

    def pixels(self, images: Tensor) -> Pixels:
        """Return images that the model takes as they look: uint8, (images, height, width, 3)."""
        return Normalisation(self._preprocess.mean, self._preprocess.std).to_bytes(images)

    @property
    def _preprocess(self) -> Preprocess:
        if self.testbed.preprocess is None:
            raise ConfigError("The data does not say how its images are normalised: give domains that have `preprocess`.")
        return self.testbed.preprocess

    def _taken(self, domain: Domain) -> Domain:
        return domain if len(domain.labels) <= self.images else Subset.sample(domain, self.images)

    def _originals(self, corrupted: Domain) -> Domain:
        """Return the clean images of which corrupted ones were made, matched by their folder and name."""
        files = _files(corrupted)
        if not files or self.clean is None:
            advice = "give ImageNet's validation images, <wnid>/*.JPEG, with --clean DIR" if files else "take other data"
            raise ConfigError(f"{self.data.name} has no clean images, which this figure compares with: {advice}.")
        folder = self.clean / "val" if (self.clean / "val").is_dir() else self.clean
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise InputError(
                f"{folder} lacks {len(missing)} of {len(files)} clean images ({shorten_list(missing, most=2)}): --clean "
                "names a folder of ImageNet's validation images, <wnid>/*.JPEG, in which those of the corrupted images are."
            )
        how = input_of(self.model, mean=self._preprocess.mean, std=self._preprocess.std).photographs()
        return Files(folder, files, corrupted.labels, how)

    # ---- adaptation -----------------------------------------------------------------------------------------------

    def adapted(self, method: str, domains: Sequence[Domain], *, seed: int = 0) -> Adapter:
        """Return a copy of the model, adapted in one pass to one domain, or to several one after another."""
        adapter = self.testbed.adapted(method, seed=seed, batch_size=BATCH)
        stream = Stream(domains, "continual" if len(domains) > 1 else "normal", batch_size=BATCH, seed=seed)
        shown = f"{method}, {domains[0].key.name}" + (f" to {domains[-1].key.name}" if len(domains) > 1 else "")
        for batch in self.track(stream, shown):
            adapter(batch.images.to(self.device))
        return adapter

    def agreement(self, adapter: Adapter, clean: Tensor, corrupted: Tensor) -> str:
        """Return how far an adaptation went, and how many predictions are as on the clean images, in words.

        That needs no labels, and what is read from a figure depends on it: where a method does not help, nothing can show
        how it helps.
        """
        expected = predicted(self.model, clean)
        with adapter.frozen():
            same = [predicted(net, corrupted) == expected for net in (self.model, adapter)]
        before, after = (f"{100 * float(agrees.float().mean()):.1f} %" for agrees in same)
        agree = f"predictions are those of the clean image for {before} of the images before, {after} after"
        return f"{Adaptation.of(adapter)}; {agree}"

    # ---- words ----------------------------------------------------------------------------------------------------

    def track(self, items: Iterable[Item], what: str) -> Iterable[Item]:
        """Return the items one by one, and show how far that is."""
        return track(items, escape(what), console=self.console, transient=True)

    def protocol(self, **more: str) -> dict[str, str]:
        """Return how a figure was made, name by name."""
        told = self.origin
        return {
            "model": f"{told['model']}, weights {told['weights']}, architecture {told['architecture']}",
            "device": str(self.device),
            "data": told["data"],
            "images": f"{self.count} of each domain",
            **more,
            "versions": f"acclimate {__version__}, torch {torch.__version__}",
        }


def worded(adapter: Adapter) -> str:
    """Return the method of an adapter and its options that are not the defaults, in words."""
    method = adapter.method
    options = method.options()
    chosen = [f"{key}={value!r}" for key, value in method.config.items() if value != options[key].default]
    return f"{method.name} ({', '.join(chosen)}; else as by default)" if chosen else f"{method.name}, as by default"


def predicted(model: nn.Module, images: Tensor) -> Tensor:
    """Return the classes that a plain model, or a frozen adapter, predicts."""
    with torch.no_grad():
        outputs = [model(part) for part in images.split(BATCH)]
    return torch.cat([getattr(out, "logits", out) for out in outputs]).argmax(-1)


def with_folder(
    testbed: Testbed,
    root: Path,
    chosen: Selection,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Testbed:
    """Return a testbed whose data is any folder of images, for figures that need no labels.

    Sub-folders are taken as classes if there are several; these need not be the model's.

    Args:
        testbed: The model; its data is not used.
        root: The folder.
        chosen: The corruptions and the number of images.
        mean: How images are normalised, for a model that does not say it itself.
        std: The standard deviations of that normalisation.
    """
    paths = find_images(root)
    tops = [path.partition("/")[0] if "/" in path else "" for path in paths]
    names = sorted(set(tops))
    labels = [names.index(top) for top in tops]
    how = input_of(testbed.model, mean=mean, std=std).photographs()

    def opened(key: DomainKey) -> Domain:
        return chosen.sampled(Files(root, paths, labels, how, corruption=chosen.corruption(key)))

    domains = [opened(key) for key in chosen.keys([CLEAN], SEVERITY)]
    return replace(testbed, data=Data("folder", domains, names if len(names) > 1 else (), opener=opened))


def _files(domain: Domain) -> list[str]:
    """Return the paths of a domain's images from its root; none, if its images are not files."""

    def file(domain: Domain, index: int) -> str | None:
        if isinstance(domain, Subset):
            return file(domain.domain, int(domain.chosen[index]))
        return os.path.relpath(domain.path(index), domain.root) if isinstance(domain, Files) else None

    return [path for index in range(len(domain.labels)) if (path := file(domain, index)) is not None]
