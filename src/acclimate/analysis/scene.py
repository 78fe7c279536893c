"""A source model and clean pictures, to be corrupted and adapted to: what every figure starts from."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from .. import __version__
from ..core.adapt import adapt
from ..core.adapter import Adapter
from ..core.registry import create
from ..core.statistics import SourceStatistics, fitting
from ..data import bundled
from ..data.disk import read_rgb
from ..data.domains import Corrupted, Images
from ..data.folder import find_pictures
from ..data.preprocess import Preprocess, input_of
from ..data.streams import Stream
from ..errors import InputError, require_whole
from ..models.loading import BUNDLED, load_model, pick_device

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
    statistics: Sequence[SourceStatistics] = ()  # of the source data, for methods that need some
    classes: tuple[str, ...] = ()  # what the labels stand for, if they mean anything

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
        if pictures is None and model != BUNDLED:
            raise InputError(f"The bundled images are not for {model}: give a folder of pictures (--pictures DIR).")
        net = load_model(model, weights=weights).to(pick_device(device))
        if pictures is None:
            shown = bundled.images().sample(count)
            return cls(
                net, shown, True, BUNDLED, bundled.MEAN, bundled.STD, bundled.SEVERITY, bundled.CONSTANTS,
                bundled.options(), bundled.source_statistics(), bundled.CLASSES,
            )  # fmt: skip
        takes = input_of(net)
        own: dict[str, Any] = {}
        if model == BUNDLED:
            own = {"options": bundled.options(), "statistics": bundled.source_statistics()}
        shown, names = _read(Path(pictures), takes.photographs(), count, console)
        return cls(net, shown, len(names) > 1, model, takes.mean, takes.std, 5, classes=names, **own)

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

    def statistics_for(self, method: str, options: Mapping[str, Any]) -> SourceStatistics | None:
        """What a method with these options needs of the source data, if it needs anything."""
        needs = create(method, options).info.needs
        return fitting(self.statistics, needs) if needs else None

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
        known = {**self.options.get(method, {}), **options}
        needs = create(method, known).info.needs
        given = fitting(self.statistics, needs) if needs else None
        adapter = adapt(
            copy.deepcopy(self.source), method, mean=self.mean, std=self.std, seed=seed, source_statistics=given, **known
        )
        stream = Stream(domains, "continual" if len(domains) > 1 else "normal", batch_size=BATCH, seed=seed)
        shown = f"{method}, {domains[0].name}" + (f" to {domains[-1].name}" if len(domains) > 1 else "")
        for batch in track(stream, shown, console=console or Console(quiet=True), transient=True):
            adapter(batch.images)
        return adapter

    def protocol(self, name: str, severity: int | None, adapter: Adapter, seed: int) -> dict[str, str]:
        """How a figure was made, for its protocol: the model, the pictures, what happened to them, and what adapted."""
        method, (count, height, width, _) = adapter.method, self.images.pixels.shape
        options = method.options()
        chosen = [f"{key}={value!r}" for key, value in method.config.items() if value != options[key].default]
        return {
            "model": self.name,
            "pictures": f"{count} of {height} x {width} pixels",
            "corruption": f"{name}, severity {severity or self.severity}",
            "method": f"{method.name} ({', '.join(chosen)}; else as by default)"
            if chosen
            else f"{method.name}, as by default",
            "stream": f"one pass in batches of {BATCH}, in random order",
            "seed": str(seed),
            "versions": f"acclimate {__version__}, torch {torch.__version__}",
        }

    def outcome(self, adapter: Adapter, clean: Tensor, corrupted: Tensor) -> str:
        """Of a fresh adaptation, in words: how far it went, and how many predictions are as on the clean pictures.

        That needs no labels, and what is read from a figure depends on it: where a method does not help, nothing can show
        how it helps.
        """
        expected = predicted(self.source, clean)
        with adapter.frozen():
            same = [predicted(net, corrupted) == expected for net in (self.source, adapter)]
        before, after = (float(agrees.float().mean()) for agrees in same)
        return (
            f"{int(adapter.steps)} steps moved what adapts by {100 * adapter.engine.adapted.drift():.2g} %; predictions are "
            f"those of the clean picture for {100 * before:.1f} % of the pictures before, {100 * after:.1f} % after"
        )


def _read(folder: Path, preprocess: Preprocess, count: int, console: Console | None) -> tuple[Images, tuple[str, ...]]:
    """Pictures below a folder as the model wants them, and what their labels stand for: sub-folders."""
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
    return Images(np.stack(pixels), labels, chosen), tuple(names)


def predicted(model: nn.Module, images: Tensor) -> Tensor:
    """Classes of images under a plain model, in parts."""
    with torch.no_grad():
        outputs = [model(part) for part in images.split(BATCH)]
    return torch.cat([getattr(out, "logits", out) for out in outputs]).argmax(-1)
