"""A testbed: a source model and data for it, which every experiment opens in the same way."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..core.adapt import adapt
from ..core.adapter import Adapter
from ..core.method import Method
from ..core.statistics import SourceStatistics, choose_statistics
from ..data.catalog import Data, Selection, find_data_set, open_data
from ..data.dataset import own_domains
from ..data.domains import Domain
from ..data.preprocess import Preprocess
from ..errors import ConfigError
from ..models.loading import SourceModel, pick_device, source_model
from ..models.normalisation import processor_normalisation
from .spec import method_of

BUNDLED = "bundled"  # the default model and data
Statistics = SourceStatistics | str | os.PathLike[str]
OwnData = Dataset[Any] | DataLoader[Any]
Given = str | Data | Sequence[Domain] | OwnData | Mapping[str, OwnData]


@dataclass(frozen=True)
class Testbed:
    """A source model, data that is prepared for it, and its options and source statistics.

    `open_testbed` returns it.

    Args:
        model: The source model. Experiments wrap it, or copies of it, and unwrap it again.
        name: The name of the model in results.
        data: The data.
        tuned: A function that returns options of methods, tuned for the model and for batches of a given size.
        statistics: The source statistics of the model, for methods that need some.
    """

    __test__ = False  # otherwise pytest would collect this class as tests

    model: nn.Module
    name: str
    data: Data
    tuned: Callable[[int], Mapping[str, Mapping[str, Any]]] = lambda batch_size: {}
    statistics: Sequence[SourceStatistics] = ()

    @property
    def preprocess(self) -> Preprocess | None:
        """The preprocessing of the images, if it is known."""
        return self.data.domains[0].preprocess

    def options(self, method: str, batch_size: int = 64) -> dict[str, Any]:
        """Return the options that were tuned for a method, or an empty dictionary."""
        return dict(self.tuned(batch_size).get(method, {}))

    def statistics_for(self, method: str | type[Method], options: Mapping[str, Any]) -> SourceStatistics | None:
        """Return the source statistics that a method with these options needs, or None if it needs none."""
        needs = method_of(method, options).info.needs
        return choose_statistics(self.statistics, needs) if needs else None

    def adapted(self, method: str, *, seed: int = 0, batch_size: int = 64, **options: Any) -> Adapter:
        """Return a wrapped copy of the model, with the tuned options and the statistics of a method."""
        chosen = {**self.options(method, batch_size), **options}
        known = self.statistics_for(method, chosen)
        how: dict[str, Any] = {} if self.preprocess is None else {"mean": self.preprocess.mean, "std": self.preprocess.std}
        return adapt(copy.deepcopy(self.model), method, seed=seed, source_statistics=known, **how, **chosen)


def open_testbed(
    model: nn.Module | str = BUNDLED,
    data: Given = BUNDLED,
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
        model: A model, "bundled", the name of a timm model with its tag, or a file of `acclimate train-source`.
        data: The name of a data set (`acclimate data list`), an opened data set, domains, or own data: a dataset or a loader
            of torch, whose items begin with an image as the model takes it and a label, or a dictionary of these.
        root: The folder of the data set.
        selection: The part of the data set to open.
        weights: A local file with weights of a timm model.
        model_name: The name of the model in results.
        mean: The mean of the normalisation, for a model whose configuration does not contain it.
        std: The standard deviation of the normalisation, for a model whose configuration does not contain it.
        processor: A transformers image processor, or torchvision weights, instead of `mean` and `std`.
        source_statistics: One or several source statistics, or their files. Default: those of the model, which only the
            bundled model has.
        needed: The kinds of source statistics that will be needed; None for all. Others are not read from the disk.
        tuned: Whether to use the options that were tuned for the model, which only the bundled model has.
        device: The device of the model. Default: a GPU if there is one.
    """
    if processor is not None:
        if mean is not None or std is not None:
            raise ConfigError("processor= says how images are normalised: leave out mean= and std=.")
        mean, std = processor_normalisation(processor)
    where = pick_device(device)
    if isinstance(data, str):
        find_data_set(data, root)  # raises an error before the model is loaded
    source = source_model(model, weights=weights) if isinstance(model, str) else _given(model)
    net = source.load().to(where)
    if isinstance(data, str):
        opened = open_data(data, root, net, selection, mean=mean, std=std)
    else:
        chosen = selection or Selection()
        if chosen != Selection(images=chosen.images) or root is not None:
            raise ConfigError("The data is given as it is: only images= can choose a part of it.")
        opened = data if isinstance(data, Data) else Data("custom", own_domains(data), ())
        opened = Data(**{**vars(opened), "domains": [chosen.sampled(domain) for domain in opened.domains]})
    statistics = source.statistics(needed) if source_statistics is None else opened_statistics(source_statistics)
    return Testbed(net, model_name or source.name, opened, lambda size: source.options(size, tuned), statistics)


def _given(model: nn.Module) -> SourceModel:
    """Return a source model for a model that is given as an object."""
    return SourceModel(type(model).__name__, lambda: model)


def opened_statistics(given: Statistics | Sequence[Statistics] | None) -> list[SourceStatistics]:
    """Return a list of statistics, which may be given as objects or as files."""
    each = [given] if isinstance(given, (SourceStatistics, str, os.PathLike)) else given or []
    return [SourceStatistics.opened(statistics) for statistics in each]
