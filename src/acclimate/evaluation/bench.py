"""`acclimate.bench`: from names of a model, data, methods and settings to results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ..core.registry import DEFAULT_METHODS, create
from ..data.catalog import Data, Selection
from ..data.corruptions import SEVERITIES
from ..data.domains import Domain
from ..data.streams import ARRANGEMENTS, Stream
from ..errors import ConfigError, require_whole
from .grid import Execution, run_grid
from .results import Results
from .spec import Protocol
from .store import Outcome, Store
from .testbed import BUNDLED, Statistics, open_testbed


def bench(
    model: nn.Module | str = BUNDLED,
    data: str | Data | Sequence[Domain] = BUNDLED,
    root: str | os.PathLike[str] | None = None,
    *,
    methods: Sequence[str | tuple[str, Mapping[str, Any]]] | Mapping[str, Mapping[str, Any]] = DEFAULT_METHODS,
    settings: str | Sequence[str] = "normal",
    seeds: Sequence[int] = (0,),
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    domains: Sequence[str] | None = None,
    images: int | None = None,
    constants: str | None = None,
    partial: bool = False,
    batch_size: int = 64,
    order: str | os.PathLike[str] | None = None,
    tuned: bool = True,
    reference: bool = False,
    weights: str | os.PathLike[str] | None = None,
    model_name: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    processor: object | None = None,
    source_statistics: Statistics | Sequence[Statistics] | None = None,
    protocol: Protocol | None = None,
    execution: Execution | None = None,
    out: str | os.PathLike[str] | None = "runs",
    fresh: bool = False,
    console: Console | None = None,
) -> Results:
    """Run methods on streams of data, each from the source model, and score them.

    Without arguments: four methods with the bundled model on the bundled images, under one corruption of each group.

    Args:
        model: A model, "bundled", a name of timm's with its tag, or a file of `acclimate train-source`.
        data: A data set's name (`acclimate data list`), an opened one, or domains.
        root: The data set's folder.
        methods: Names, Python files that register a method, or pairs of these with options, each as often as there are
            options to compare.
        settings: One or several of `acclimate.data.streams.SETTINGS`, or such joined by a plus sign.
        seeds: Of the streams' orders and of the methods.
        corruptions: Which; default: all 15, of the bundled images one of each group. "clean" shows clean images.
        severities: Which; default: 5, of the bundled images 2; all in the setting gradual.
        domains: Of Office-Home which.
        images: Of each domain so many, always the same ones; default: all, of the bundled ones 2000.
        constants: How strong a severity is that is made on the fly: "imagenet-c" or "cifar-10-c".
        partial: Accept a data set that is not complete.
        batch_size: Images at a time.
        order: The index file (`.npy`) of a label-shift stream, as SAR's authors share theirs.
        tuned: Where an option is not given, take the one that was tuned for the model, not the method's default. Of the
            models that are known by name the bundled one has such.
        reference: Run every method as its authors' code, and without a guard.
        weights: A local file with weights for a name of timm's.
        model_name: What to call the model in results.
        mean: How images are normalised, for a model that does not say it itself.
        std: The standard deviations of that normalisation.
        processor: Instead of mean and std: a transformers image processor, or torchvision weights.
        source_statistics: Statistics of the source data, or their file, for methods that need them, or several such: see
            `acclimate.source_statistics` and `acclimate train-prompts`. The bundled model has its own.
        protocol: What holds for all runs. `classes` and `unknown` come from the data.
        execution: Device, threads, processes, Ray, shards.
        out: Folder in which runs are kept, taken up and found again; None keeps nothing.
        fresh: Run also what the folder has.
        console: Where progress is shown.

    Returns:
        The results, in the order of streams and methods.

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
    execution = execution or Execution()
    if execution.threads is not None:
        require_whole(1, threads=execution.threads)
        torch.set_num_threads(execution.threads)
    pairs = methods.items() if isinstance(methods, Mapping) else [(m, {}) if isinstance(m, str) else m for m in methods]
    authors: dict[str, Any] = {"reference": True} if reference else {}
    # a wrong name is an error before the data is looked at
    needed = {kind for method, options in pairs for kind in create(method, {**options, **authors}).info.needs}

    testbed = open_testbed(
        model,
        data,
        root,
        Selection(corruptions, severities, domains, images, partial, constants),
        weights=weights,
        model_name=model_name,
        mean=mean,
        std=std,
        processor=processor,
        source_statistics=source_statistics,
        needed=needed,
        tuned=tuned and not reference,
        device=execution.device,
    )
    opened = testbed.data
    protocol = protocol or Protocol(guard=not reference)
    if not isinstance(data, Sequence) or isinstance(data, str):
        classes = None if opened.classes is None else tuple(opened.classes)
        protocol = replace(protocol, classes=classes, unknown=opened.unknown)
    workers = execution.workers_for(opened)
    streams = [
        Stream(group, setting, batch_size=batch_size, seed=seed, workers=workers,
               order=order if "label-shift" in setting else None)
        for setting in settings
        for seed in seeds
        for group in (
            [opened.domains] if any(part in setting for part in ARRANGEMENTS) else [[domain] for domain in opened.domains]
        )
    ]  # fmt: skip
    outcomes: list[Outcome] = []
    for size in dict.fromkeys(stream.batch_size for stream in streams):
        outcomes += run_grid(
            testbed,
            [stream for stream in streams if stream.batch_size == size],
            [(method, {**testbed.options(method, size), **options, **authors}) for method, options in pairs],
            protocol=protocol,
            execution=execution,
            store=None if out is None else Store(out),
            fresh=fresh,
            console=console,
        )
    return Results(outcomes)
