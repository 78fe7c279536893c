"""`acclimate.bench(...)`: from names of data, model, methods and settings to results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ..core.registry import create
from ..core.statistics import SourceStatistics
from ..data import bundled
from ..data.catalog import Data, open_data
from ..data.corruptions import SEVERITIES
from ..data.datasets import Corrupted, Domain, Subset
from ..data.streams import ARRANGEMENTS, Stream
from ..errors import ConfigError, require_whole
from ..models.loading import BUNDLED, load_model, pick_device
from .grid import sweep
from .results import Results
from .spec import Protocol
from .store import Outcome, Store

FIRST = ("source", "tent", "sar", "dct")
Source = SourceStatistics | str | os.PathLike[str]


def bench(
    model: nn.Module | str = BUNDLED,
    data: str | Data | Sequence[Domain] = BUNDLED,
    root: str | os.PathLike[str] | None = None,
    *,
    methods: Sequence[str | tuple[str, Mapping[str, Any]]] | Mapping[str, Mapping[str, Any]] = FIRST,
    settings: str | Sequence[str] = "normal",
    seeds: Sequence[int] = (0,),
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    domains: Sequence[str] | None = None,
    images: int | None = None,
    batch_size: int = 64,
    order: str | os.PathLike[str] | None = None,
    partial: bool = False,
    constants: str | None = None,
    tuned: bool = True,
    reference: bool = False,
    protocol: Protocol | None = None,
    source_statistics: Source | Sequence[Source] | None = None,
    weights: str | os.PathLike[str] | None = None,
    model_name: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    workers: int | None = None,
    store: str | os.PathLike[str] | None = "runs",
    again: bool = False,
    shard: tuple[int, int] = (1, 1),
    jobs: int = 1,
    on: str | None = None,
    gpus: float | None = None,
    console: Console | None = None,
) -> Results:
    """Run methods on streams of data, each from the source model, and score them.

    Without arguments: four methods with the bundled model on the bundled images, under one corruption of each family.

    Args:
        model: A model, "bundled", a name of timm's with its tag, or a file of `acclimate train-source`.
        data: A data set's name (`acclimate data list`), an opened one, or domains.
        root: The data set's folder.
        methods: Names, or names with options, each as often as there are options to compare.
        settings: One or several of `acclimate.data.streams.SETTINGS`, or such joined by a plus sign.
        seeds: Of the streams' orders and of the methods.
        corruptions: Which; default: all 15, of the bundled images one of each family. "clean" shows clean images.
        severities: Which; default: 5, of the bundled images 2; all in the setting gradual.
        domains: Of Office-Home which.
        images: Of each domain so many, always the same ones; default: all, of the bundled ones 2000.
        batch_size: Images at a time.
        order: The index file (`.npy`) of a label-shift stream, as SAR's authors share theirs.
        partial: Accept a data set that is not complete.
        constants: How strong a severity is that is made on the fly: "imagenet-c" or "cifar-10-c".
        tuned: Of the bundled model: where an option is not given, the one that was tuned for it, not the method's default.
        reference: Every method as its authors' code, and no guard.
        protocol: What holds for all runs. `classes` and `unknown` come from the data.
        source_statistics: Statistics of the source data, or their file, for methods that need them: see `acclimate.source_statistics`
            and `acclimate train-prompts`; or several such. The bundled model has its own.
        weights: A local file with weights for a name of timm's.
        model_name: What to call a model in results.
        device: Default: a GPU if there is one.
        threads: On a CPU; default: torch's. It is part of a run's identity, because sums are rounded in its order.
        workers: Processes that load images ahead; default: none for the bundled images, else up to 4.
        store: Folder in which runs are kept, taken up and found again; None keeps nothing.
        again: Run also what the store has.
        shard: See `acclimate.bench.sweep.sweep`; so `jobs`, `on` and `gpus`.
        jobs: See `shard`.
        on: See `shard`.
        gpus: See `shard`.
        console: Where progress is shown.

    Example:
        >>> results = acclimate.bench(methods=["source", "dct"], corruptions=["fog"])
        >>> results.table()           # printed, or shown in a notebook
        >>> results.frame()           # a pandas data frame, a row for each run and domain
        >>> results[0].result.top1
    """
    settings = [settings] if isinstance(settings, str) else list(settings)
    gradual = [setting for setting in settings if "gradual" in setting]
    if gradual and (severities is not None or len(gradual) < len(settings)):
        raise ConfigError("gradual has all five severities: it goes with no others, and with no other setting.")
    severities = list(SEVERITIES) if gradual else severities
    if threads is not None:
        require_whole(1, threads=threads)
        torch.set_num_threads(threads)
    name = model_name or (model if isinstance(model, str) else type(model).__name__)
    net = (load_model(model, weights=weights) if isinstance(model, str) else model).to(pick_device(device))

    given = methods.items() if isinstance(methods, Mapping) else [(m, {}) if isinstance(m, str) else m for m in methods]
    authors: dict[str, Any] = {"reference": True} if reference else {}

    def chosen(size: int) -> list[tuple[str, dict[str, Any]]]:
        """The methods with their options, for batches of a size."""
        own = {} if model != BUNDLED else bundled.options(size) if tuned and not reference else bundled.ASSETS
        return [(method, {**own.get(method, {}), **options, **authors}) for method, options in given]

    # a wrong name is an error before the data is looked at
    needed = {kind for method, options in chosen(batch_size) for kind in create(method, options).info.needs}
    statistics = (
        bundled.source(needed) if source_statistics is None and model == BUNDLED else statistics_of(source_statistics)
    )

    protocol = protocol or Protocol(guard=not reference)
    if isinstance(data, str) and data == BUNDLED:
        found = _bundled(corruptions, severities, images, constants)
        images = None
    elif isinstance(data, str):
        if root is None:
            raise ConfigError(f"data={data!r}: say in which folder it is (root=; on the command line --root).")
        opened = open_data(
            data, root, net, corruptions=corruptions, severities=severities, domains=domains, partial=partial,
            constants=constants,
        )  # fmt: skip
        found, protocol = opened.domains, _restricted(protocol, opened)
    elif isinstance(data, Data):
        found, protocol = data.domains, _restricted(protocol, data)
    else:
        found = list(data)
    dataset = data if isinstance(data, str) else data.name if isinstance(data, Data) else "custom"
    if images is not None:
        found = [Subset(domain, images) for domain in found]
    workers = workers if workers is not None else 0 if data == BUNDLED else min(4, os.cpu_count() or 1)
    streams = [
        Stream(group, setting, batch_size=batch_size, seed=seed, workers=workers,
               order=order if "label-shift" in setting else None)
        for setting in settings
        for seed in seeds
        for group in ([found] if any(part in setting for part in ARRANGEMENTS) else [[domain] for domain in found])
    ]  # fmt: skip
    outcomes: list[Outcome] = []
    for size in dict.fromkeys(stream.batch_size for stream in streams):
        outcomes += sweep(
            net, [stream for stream in streams if stream.batch_size == size], chosen(size), model_name=name,
            dataset=dataset, protocol=protocol, source_statistics=statistics, store=None if store is None else Store(store),
            again=again, shard=shard, jobs=jobs, on=on, gpus=gpus, console=console,
        )  # fmt: skip
    return Results(outcomes)


def statistics_of(source: Source | Sequence[Source] | None) -> list[SourceStatistics]:
    """Statistics, one or several, given as themselves or by their files."""
    each = [source] if isinstance(source, (SourceStatistics, str, os.PathLike)) else source or []
    return [s if isinstance(s, SourceStatistics) else SourceStatistics.load(s) for s in each]


def _restricted(protocol: Protocol, data: Data) -> Protocol:
    return replace(protocol, classes=None if data.classes is None else tuple(data.classes), unknown=data.unknown)


def _bundled(
    corruptions: Sequence[str] | None, severities: Sequence[int] | None, images: int | None, constants: str | None
) -> list[Domain]:
    """The bundled images under corruptions, without those on which options were tuned."""
    everything = bundled.images()
    most = len(everything.labels) - bundled.FOR_TUNING
    count = min(2000, most) if images is None else images
    if count > most:
        raise ConfigError(f"images={count}: at most {most}; the options were tuned on the others.")
    pictures = everything.sample(count)
    how: dict[str, Any] = dict(mean=bundled.MEAN, std=bundled.STD)
    return [
        Corrupted(pictures, name, **how)
        if name == "clean"
        else Corrupted(pictures, name, severity, constants=constants or bundled.CONSTANTS, **how)
        for name in (bundled.SHOWN if corruptions is None else corruptions)
        for severity in ((bundled.SEVERITY,) if severities is None else severities)
    ]
