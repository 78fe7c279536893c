"""A testbed: a source model and data for it, which every experiment opens in the same way."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..core.adapt import adapt
from ..core.adapter import Adapter
from ..core.method import Method
from ..core.registry import create
from ..core.statistics import SourceStatistics, fitting
from ..data.catalog import Data, Selection, open_data
from ..data.domains import Domain
from ..data.preprocess import Preprocess
from ..errors import ConfigError
from ..models.loading import SourceModel, pick_device, source_model
from ..models.normalisation import processor_normalisation

BUNDLED = "bundled"  # the default model and data
Statistics = SourceStatistics | str | os.PathLike[str]


@dataclass(frozen=True)
class Testbed:
    """A source model, data that is prepared for it, and what belongs to the model. Made by `open_testbed`.

    Args:
        model: The source model. Experiments wrap it, or copies of it, and give it back.
        name: What results call it.
        data: The data.
        tuned: Returns options of methods that were tuned for the model and batches of a size.
        statistics: Source statistics of the model, for methods that need some.
    """

    __test__ = False  # pytest takes classes of this name for tests

    model: nn.Module
    name: str
    data: Data
    tuned: Callable[[int], Mapping[str, Mapping[str, Any]]] = lambda batch_size: {}
    statistics: Sequence[SourceStatistics] = ()

    @property
    def preprocess(self) -> Preprocess | None:
        """How the images are prepared for the model, where that is known."""
        return self.data.domains[0].preprocess

    def options(self, method: str, batch_size: int = 64) -> dict[str, Any]:
        """Return the options that were tuned for a method, none where there are none."""
        return dict(self.tuned(batch_size).get(method, {}))

    def statistics_for(self, method: str | type[Method], options: Mapping[str, Any]) -> SourceStatistics | None:
        """Return what a method with these options needs of the source statistics, None if it needs nothing."""
        needs = create(method, options).info.needs
        return fitting(self.statistics, needs) if needs else None

    def adapted(self, method: str, *, seed: int = 0, batch_size: int = 64, **options: Any) -> Adapter:
        """Return a copy of the model that a method has wrapped, with its tuned options and statistics."""
        chosen = {**self.options(method, batch_size), **options}
        known = self.statistics_for(method, chosen)
        how: dict[str, Any] = {} if self.preprocess is None else {"mean": self.preprocess.mean, "std": self.preprocess.std}
        return adapt(copy.deepcopy(self.model), method, seed=seed, source_statistics=known, **how, **chosen)


def open_testbed(
    model: nn.Module | str = BUNDLED,
    data: str | Data | Sequence[Domain] = BUNDLED,
    root: str | os.PathLike[str] | None = None,
    selection: Selection | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    model_name: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    processor: object | None = None,
    source_statistics: Statistics | Sequence[Statistics] | None = None,
    needed: Collection[str] | None = None,
    tuned: bool = True,
    device: str | None = None,
) -> Testbed:
    """Open a source model and data for it.

    Args:
        model: A model, "bundled", a name of timm's with its tag, or a file of `acclimate train-source`.
        data: A data set's name (`acclimate data list`), an opened one, or domains.
        root: The data set's folder.
        selection: Which part of the data set.
        weights: A local file with weights for a name of timm's.
        model_name: What to call the model in results.
        mean: How images are normalised, for a model that does not say it itself.
        std: The standard deviations of that normalisation.
        processor: Instead of mean and std: a transformers image processor, or torchvision weights.
        source_statistics: Statistics of the source data, or their file, or several such. Default: those that belong to the
            model, which the bundled one has.
        needed: Kinds of source statistics that will be needed; None for all. Others are not read from the disk.
        tuned: Take the options that were tuned for the model, which the bundled one has.
        device: Where to put the model; default: a GPU if there is one.
    """
    if processor is not None:
        if mean is not None or std is not None:
            raise ConfigError("processor= says how images are normalised: leave out mean= and std=.")
        mean, std = processor_normalisation(processor)
    source = source_model(model, weights=weights) if isinstance(model, str) else _given(model)
    net = source.load().to(pick_device(device))
    if isinstance(data, str):
        opened = open_data(data, root, net, selection, mean=mean, std=std)
    else:
        chosen = selection or Selection()
        if chosen != Selection(images=chosen.images) or root is not None:
            raise ConfigError("The data is given as it is: only images= can choose a part of it.")
        opened = data if isinstance(data, Data) else Data("custom", list(data), ())
        opened = Data(**{**vars(opened), "domains": [chosen.sampled(domain) for domain in opened.domains]})
    statistics = source.statistics(needed) if source_statistics is None else opened_statistics(source_statistics)
    return Testbed(net, model_name or source.name, opened, lambda size: source.options(size, tuned), statistics)


def _given(model: nn.Module) -> SourceModel:
    """Return a model that is given as itself."""
    return SourceModel(type(model).__name__, lambda: model)


def opened_statistics(given: Statistics | Sequence[Statistics] | None) -> list[SourceStatistics]:
    """Return statistics, one or several, that are given as themselves or by their files."""
    each = [given] if isinstance(given, (SourceStatistics, str, os.PathLike)) else given or []
    return [SourceStatistics.opened(statistics) for statistics in each]
