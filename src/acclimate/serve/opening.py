"""What is served: a model and a method by name become a service."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..core.adapt import adapt
from ..core.adapter import Adapter
from ..core.registry import create_method
from ..core.statistics import SourceStatistics, choose_statistics
from ..data.preprocess import Preprocess
from ..models.loading import pick_device, source_model


def open_adapter(
    model: str,
    method: str,
    options: Mapping[str, Any] | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    source_statistics: str | os.PathLike[str] | None = None,
    device: str | None = None,
) -> tuple[Adapter, Preprocess, tuple[str, ...]]:
    """Return a wrapped model that replies first, its preprocessing, and the names of its classes.

    Args:
        model: "bundled", the name of a timm model with its tag, or a file of `acclimate train-source`.
        method: The name of a method.
        options: Options of the method.
        weights: A local file with weights of a timm model.
        mean: The mean of the normalisation, for a model whose configuration does not contain it.
        std: The standard deviation of the normalisation, in the same form.
        source_statistics: A file of source statistics, for a method that needs some.
        device: The device. Default: a GPU if there is one.
    """
    source = source_model(model, weights=weights)
    net = source.load().to(pick_device(device))
    preprocess = Preprocess.for_model(net, mean=mean, std=std)
    chosen = {**source.options(64, False).get(method, {}), **(options or {})}
    needs = create_method(method, chosen).info.needs
    statistics: SourceStatistics | str | os.PathLike[str] | None = source_statistics
    if needs and statistics is None:
        statistics = choose_statistics(source.statistics(needs), needs)
    adapter = adapt(
        net,
        method,
        mean=preprocess.mean,
        std=preprocess.std,
        source_statistics=statistics,
        reply="first",
        **chosen,
    )
    return adapter, preprocess, labels_of(net, adapter.engine.num_classes)


def labels_of(model: nn.Module, count: int) -> tuple[str, ...]:
    """Return the names of the classes that a model knows, or their numbers."""
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    names = tuple(config.get("label_names") or ())
    if len(names) == count:
        return tuple(map(str, names))
    if count == 1000 and not names:
        from timm.data import ImageNetInfo

        imagenet = ImageNetInfo()
        return tuple(imagenet.index_to_description(i) for i in range(count))
    return tuple(map(str, range(count)))
