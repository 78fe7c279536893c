"""A source model and clean pictures, to be corrupted and adapted to: what every figure starts from."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from ..adapter import Adapter
from ..data import bundled
from ..data.datasets import Corrupted, Images
from ..data.disk import Preprocess, input_of, read_rgb
from ..data.folder import find_pictures
from ..data.streams import Stream
from ..errors import InputError, require_whole
from ..method import find
from ..models import BUNDLED, load_model, pick_device
from ..source import SourceStatistics
from ..wrap import adapt

BATCH = 64


@dataclass(frozen=True)
class Scene:
    """Made by `Scene.open`. The source model in it is never adapted; what adapts is a copy."""

    source: nn.Module
    images: Images
    labelled: bool  # whether the labels of the images mean anything
    name: str  # of the model
    mean: tuple[float, ...]
    std: tuple[float, ...]
    severity: int  # at which the model is hurt, and not lost
    constants: str | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of methods, tuned for this model
    statistics: SourceStatistics | None = None
    classes: int = 1  # that the labels tell apart, whether or not a picture of each is among the images

    @classmethod
    def open(
        cls,
        model: str = BUNDLED,
        pictures: str | os.PathLike[str] | None = None,
        *,
        weights: str | os.PathLike[str] | None = None,
        count: int = 512,
        device: str | None = None,
        console: Console | None = None,
    ) -> Scene:
        """A model by name, and pictures from a folder.

        Args:
            model: "bundled", a name of timm's, or a file of `acclimate train-source`.
            pictures: A folder; if it has sub-folders, these are taken as classes. Default: the bundled images, which only
                the bundled model understands.
            weights: A local file with weights for a name of timm's.
            count: So many pictures at most, always the same ones.
            device: Default: a GPU if there is one.
            console: Where reading the pictures shows its progress.
        """
        require_whole(1, count=count)
        net = load_model(model, weights=weights).to(pick_device(device))
        if pictures is None:
            if model != BUNDLED:
                raise InputError(f"The bundled images are not for {model}: give a folder of pictures (--pictures DIR).")
            shown = bundled.images().sample(count)
            return cls(
                net, shown, True, BUNDLED, bundled.MEAN, bundled.STD, bundled.SEVERITY, bundled.CONSTANTS,
                bundled.tuned(), bundled.statistics(), len(bundled.CLASSES),
            )  # fmt: skip
        takes = input_of(net)
        own: dict[str, Any] = {"options": bundled.tuned(), "statistics": bundled.statistics()} if model == BUNDLED else {}
        shown, classes = _read(Path(pictures), takes.photographs(), count, console)
        return cls(net, shown, classes > 1, model, takes.mean, takes.std, 5, classes=classes, **own)

    def domain(self, name: str = "clean", severity: int | None = None) -> Corrupted:
        """The pictures under a corruption, by default at the scene's severity, or clean."""
        if name != "clean":
            severity = severity or self.severity
        return Corrupted(self.images, name, severity, mean=self.mean, std=self.std, constants=self.constants)

    def batch(self, name: str = "clean", severity: int | None = None, *, count: int | None = None) -> Tensor:
        """The first so many pictures, or all, as the model takes them, and where it takes them."""
        number = len(self.images.labels) if count is None else min(count, len(self.images.labels))
        device = next(self.source.parameters()).device
        return self.domain(name, severity).load(np.arange(number)).to(device)

    def adapted(
        self,
        method: str = "dct",
        name: str = "clean",
        severity: int | None = None,
        *,
        seed: int = 0,
        console: Console | None = None,
        **options: Any,
    ) -> Adapter:
        """A copy of the model that a method adapted to all pictures under a corruption, in one pass. Use it `frozen`."""
        return self.wandered(method, [self.domain(name, severity)], seed=seed, console=console, **options)

    def wandered(
        self, method: str, domains: list[Corrupted], *, seed: int = 0, console: Console | None = None, **options: Any
    ) -> Adapter:
        """The same, adapted to several domains, one after another, without a reset between them."""
        needs: dict[str, Any] = {"source": self.statistics} if find(method).needs else {}
        known = {**self.options.get(method, {}), **options}
        adapter = adapt(copy.deepcopy(self.source), method, mean=self.mean, std=self.std, seed=seed, **needs, **known)
        stream = Stream(domains, "continual" if len(domains) > 1 else "normal", batch_size=BATCH, seed=seed)
        shown = f"{method}, {domains[0].name}" + (f" to {domains[-1].name}" if len(domains) > 1 else "")
        for batch in track(stream, shown, console=console or Console(quiet=True), transient=True):
            adapter(batch.images)
        return adapter


def _read(folder: Path, preprocess: Preprocess, count: int, console: Console | None) -> tuple[Images, int]:
    """Pictures below a folder as the model wants them, and how many classes they have: the sub-folders, in their order."""
    paths = find_pictures(folder)
    chosen = np.sort(np.random.RandomState(0).permutation(len(paths))[:count])
    tops = [path.rpartition("/")[0] for path in paths]
    names = sorted(set(tops))
    pixels = []
    for i in track(chosen, "pictures", console=console or Console(quiet=True), transient=True):
        try:
            pixels.append(preprocess(read_rgb(folder / paths[i])))
        except InputError as error:
            raise InputError(f"{folder / paths[i]}: {error}") from None
    labels = np.array([names.index(tops[i]) for i in chosen], dtype=np.int64)
    return Images(np.stack(pixels), labels, chosen), len(names)


def predicted(model: nn.Module, images: Tensor) -> Tensor:
    """Classes of images under a plain model, in parts."""
    with torch.no_grad():
        outputs = [model(part) for part in images.split(BATCH)]
    return torch.cat([getattr(out, "logits", out) for out in outputs]).argmax(-1)
