"""`acclimate.bench`, which turns names of a model, data, methods and settings into results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ..data.catalog import SHOWN, Selection, shows_corruptions
from ..data.corruptions import SEVERITIES
from ..data.domains import CLEAN
from ..data.streams import ARRANGEMENTS, Stream, canonical_setting
from ..errors import ConfigError, require_whole
from .grid import Execution, run_grid
from .results import Results
from .spec import Protocol, method_of
from .store import Outcome, Store
from .testbed import BUNDLED, Given, Statistics, open_testbed

MethodOptions = str | tuple[str, Mapping[str, Any]]
DEFAULT_METHODS: tuple[MethodOptions, ...] = ("source", "tent", "dct", ("dct", {"recentre": True}), "keel")


def bench(
    model: nn.Module | str = BUNDLED,
    data: Given = BUNDLED,
    root: str | os.PathLike[str] | None = None,
    *,
    methods: Sequence[MethodOptions] | Mapping[str, Mapping[str, Any]] = DEFAULT_METHODS,
    settings: str | Sequence[str] = "normal",
    seeds: Sequence[int] = (0,),
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    domains: Sequence[str] | None = None,
    labels: str | os.PathLike[str] | None = None,
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

    Without arguments, it runs the unadapted model, TENT, DCT without and with recentring, and Keel, with the bundled model
    on the bundled images: clean, and under every second corruption of ImageNet-C.

    Args:
        model: A model, "bundled", the name of a timm model with its tag, or a file of `acclimate train-source`.
        data: The name of a data set (`acclimate data list`), an opened data set, domains, or own data: a dataset or a loader
            of torch, whose items begin with an image as the model takes it and a label, or a dictionary of these.
        root: The folder of the data set.
        methods: Names of methods, Python files that register a method, or pairs of these with options, among which may be
            `recentre`. A method may occur several times with different options.
        settings: One or several of `acclimate.data.streams.SETTINGS`, or settings joined by a plus sign.
        seeds: The seeds of the orders of the streams and of the methods.
        corruptions: The corruptions. "clean" selects clean images, which are one more domain in the settings mixed and
            continual. Default: for the bundled images and for a folder, clean images (except in the setting gradual) and
            every second of the 15 corruptions of ImageNet-C, in their usual order; for ImageNet-C and CIFAR-C all 15; for a
            tree that `acclimate corrupt` wrote those that are there; for other data none.
        severities: The severities. Default: 5, and for such a tree those that are there; all in the setting gradual.
        domains: The domains of Office-Home (default: all), or sub-folders of a folder that are its domains.
        labels: A CSV file with the columns file and label, for a folder whose images are in no folders of classes.
        images: The number of images of each domain, always the same ones. Default: all, for the bundled images 512.
        constants: The strengths of the severities of corruptions made on the fly: "imagenet-c" or "cifar-10-c".
        partial: Whether to accept a data set that is not complete.
        batch_size: The number of images in a batch.
        order: The index file (`.npy`) of a label-shift stream, as SAR's authors share theirs.
        tuned: Whether an option that is not given has the value that was tuned for the model, instead of the method's
            default. Of the models known by name, only the bundled one has tuned options.
        reference: Whether every method runs as its authors' code, and without a guard.
        weights: A local file with weights of a timm model.
        model_name: The name of the model in results.
        mean: The mean of the normalisation, for a model whose configuration does not contain it.
        std: The standard deviation of the normalisation, for a model whose configuration does not contain it.
        processor: A transformers image processor, or torchvision weights, instead of `mean` and `std`.
        source_statistics: One or several source statistics, or their files, for methods that need them: see
            `acclimate.source_statistics` and `acclimate train-prompts`. The bundled model has its own.
        protocol: The protocol of all runs. `classes` and `unknown` come from the data.
        execution: Device, threads, processes, Ray, shards.
        out: A folder in which runs are stored, and from which they are continued or read again. None stores nothing.
        fresh: Whether to repeat runs that are already in the folder.
        console: The console for progress.

    Returns:
        The results, in the order of streams and methods.

    Example:
        >>> results = acclimate.bench(methods=["source", "dct"], corruptions=["fog"])
        >>> results.table()           # printed, or shown in a notebook
        >>> results.frame()           # a pandas data frame, a row for each run and domain
        >>> results[0].result.top1
    """
    settings = [canonical_setting(setting) for setting in ([settings] if isinstance(settings, str) else settings)]
    gradual = [setting for setting in settings if "gradual" in setting]
    if gradual and (severities is not None or len(gradual) < len(settings)):
        raise ConfigError("gradual has all five severities: it goes with no others, and with no other setting.")
    severities = list(SEVERITIES) if gradual else severities
    if corruptions is None and isinstance(data, str) and shows_corruptions(data, root, domains):
        corruptions = [name for name in SHOWN if name != CLEAN or not gradual]
    execution = execution or Execution()
    if execution.threads is not None:
        require_whole(1, threads=execution.threads)
        torch.set_num_threads(execution.threads)
    pairs = methods.items() if isinstance(methods, Mapping) else [(m, {}) if isinstance(m, str) else m for m in methods]
    authors: dict[str, Any] = {"reference": True} if reference else {}
    # raises an error for a wrong name before the data is opened
    needed = {kind for method, options in pairs for kind in method_of(method, {**options, **authors}).info.needs}

    testbed = open_testbed(
        model,
        data,
        root,
        Selection(corruptions, severities, domains, images, partial, constants, labels=labels),
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
