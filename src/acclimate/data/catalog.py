"""Data sets by name, in the layouts in which people have them on disk.

    data = open_data("imagenet-c", "/data/ImageNet-C", model)
    adapter = acclimate.adapt(model, "dct", classes=data.classes)
    stream = Stream(data.domains[0])

A picture's label is the place of its class in the full list of the data set's classes, never among the folders that happen
to be there. What is missing or has another name is an error that says what was expected, what was found and where to get it.

| pictures | become |
|---|---|
| photographs | shorter side 256, of which the central 224 x 224; for a model of another size by its own `crop_pct` |
| ImageNet-C, stored at 224 x 224 | as they are; for a model of another size resized |
| VisDA-2021 | squashed to 256 x 256, of which the central 224 x 224; for a model of another size in proportion |
| CIFAR-C, stored at 32 x 32 | as they are; for a model of another size resized |

Resizing is bilinear. The normalisation is always the model's own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from torch import nn

from ..errors import ConfigError, InputError, UnreadableError, nearest, some
from .corruptions import CORRUPTIONS, SEVERITIES, Corruption, require_valid
from .datasets import Domain, title
from .disk import Arrays, Files, Preprocess, input_of, read_rgb
from .folder import AnyPath
from .layouts import LAYOUTS, Layout, Row, read_list, survey, synsets

SEVERITY = 5  # the papers'


@dataclass(frozen=True, repr=False)
class Data:
    """A data set, ready for streams."""

    name: str
    domains: list[Domain]
    class_names: Sequence[str]  # by label: the folders' names, or numbers where there are none
    classes: list[int] | None = None  # columns of the model's head that exist here, for `acclimate.adapt`; None: all
    unknown: int | None = None  # the label of pictures of no class: whatever is predicted for them is wrong

    @property
    def num_classes(self) -> int:
        """Labels are below this, or `unknown`."""
        return len(self.class_names)

    def pairs(self) -> list[tuple[Domain, Domain]]:
        """Every domain as source with every other one as target: Office-Home's 12."""
        return list(itertools.permutations(self.domains, 2))

    def __repr__(self) -> str:
        names = [title(domain) for domain in self.domains]
        shown = ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)} domains)"
        pictures = sum(len(domain.labels) for domain in self.domains)
        part = "" if self.classes is None else ", a part of the model's"
        return f"<Data {self.name}: {shown}; {pictures} pictures; {self.num_classes} classes{part}>"


@dataclass
class Report:
    """What is on disk of a data set, and what is wrong with it."""

    name: str
    root: Path
    rows: list[Row] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # domains that are not there and were not asked for

    @property
    def problems(self) -> list[str]:
        where: dict[str, list[str]] = {}
        for row in self.rows:
            for problem in row.problems:
                where.setdefault(problem, []).append(row.title)
        everywhere = len(self.rows)
        return [p if len(titles) == everywhere else f"{some(titles)}: {p}" for p, titles in where.items()]

    @property
    def usable(self) -> bool:
        """Whether it can be opened without `partial`."""
        return not self.problems

    def error(self, most: int = 5) -> InputError:
        """What is wrong (of that so much at most), what was expected, and where to get it."""
        layout = LAYOUTS[self.name]
        partial = " What is there can be used with partial=True." if all(row.labels for row in self.rows) else ""
        more = f"; and {len(self.problems) - most} more" if len(self.problems) > most else ""
        return InputError(
            f"{self.root} cannot be used as {self.name}. {'; '.join(self.problems[:most])}{more}. Expected: {layout.shape}. "
            f"Get it from {layout.source}.{partial}"
        )


def open_data(
    name: str,
    root: AnyPath,
    model: nn.Module | Preprocess,
    *,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    domains: Sequence[str] | None = None,
    file_list: AnyPath | None = None,
    partial: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
    constants: str | None = None,
    frost: AnyPath | None = None,
) -> Data:
    """A data set on disk, prepared for a model.

    Args:
        name: One of `LAYOUTS`; `acclimate data list` explains them.
        root: Its folder.
        model: Decides size and normalisation of the pictures, and its head which columns the labels stand for. Or a
            `Preprocess`, which is used as it is; the classes of ImageNet are then columns of a head of 1000.
        corruptions: Of ImageNet-C and CIFAR-C which to open; default: the 15. Of clean pictures which to make on the fly.
        severities: Of each corruption; default: 5.
        domains: Of Office-Home which to open; default: all four.
        file_list: Of VisDA-2021, as a path from the root. Labels from 1000 on mean no class: see `Data.unknown`.
        partial: Take a data set that is not complete, or has more than belongs to it, which is left out.
        mean: Normalisation, for a model whose configuration does not say it; so `std`.
        std: See `mean`.
        seed: Of corruptions made on the fly, as for `corrupt`; so `constants` and `frost`.
        constants: See `seed`.
        frost: See `seed`.
    """
    layout = _layout(name, file_list)
    made: list[Corruption | None] = [None]
    if corruptions is not None and len(layout.places) == 1:
        ice = None if frost is None else os.fspath(frost)
        made = [Corruption(c, s, seed, constants, ice) for c, s in _choice(corruptions, severities)]
        corruptions = severities = None
    elif constants is not None or frost is not None:
        raise ConfigError("constants= and frost= are for corruptions that are made on the fly, of clean pictures.")
    wanted = _wanted(name, layout, corruptions, severities, domains)
    head = None
    if isinstance(model, Preprocess):
        preprocess = model
        if mean is not None or std is not None:
            raise ConfigError("mean= and std= go with a model; a Preprocess has its own.")
    else:
        takes = input_of(model, mean=mean, std=std)
        preprocess, head = layout.preprocess(takes), takes.classes

    rows, names = survey(layout, Path(root), wanted)
    report = Report(name, Path(root), rows)
    if not all(row.labels for row in rows) or (report.problems and not partial):
        raise report.error()
    classes = _columns(name, names, head)
    opened: list[Domain] = []
    for row in rows:
        here, labels, which, severity = row.where, row.labels, row.name, row.severity
        if severity is not None and not row.paths:
            start = SEVERITIES.index(severity) * len(labels)
            opened.append(Arrays(here, labels, preprocess, name=which, severity=severity, start=start))
            continue
        for corruption in made:
            files = Files(here, row.paths, labels, preprocess, name=which, severity=severity, corruption=corruption)
            opened.append(files)
    return Data(name, opened, names, classes, unknown=len(names) if layout.read is read_list else None)


def check_data(
    name: str,
    root: AnyPath,
    *,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    domains: Sequence[str] | None = None,
    file_list: AnyPath | None = None,
    open_pictures: bool = False,
    console: Console | None = None,
) -> Report:
    """What there is of a data set. Bad data is reported, not raised.

    By default the domains that `open_data` opens by default must be there, and others are checked if they are.

    Args:
        name: As for `open_data`; so the others that it has, too.
        root: See `name`.
        corruptions: See `name`.
        severities: See `name`.
        domains: See `name`.
        file_list: See `name`.
        open_pictures: Decode every picture file, too.
        console: Shows progress if it is a terminal.
    """
    layout, root = _layout(name, file_list), Path(root)
    wanted = _wanted(name, layout, corruptions, severities, domains)
    absent = []
    if layout.severities and corruptions is None and severities is None:
        everything = [(corruption, severity) for corruption in layout.places for severity in SEVERITIES]
        absent = [which for which in everything if which not in wanted and not layout.place(root, *which).exists()]
        wanted = [which for which in everything if which not in absent]
    rows, _ = survey(layout, root, wanted)
    if open_pictures:
        _open_all(rows, console)
    return Report(name, root, rows, [f"{corruption}/{severity}" for corruption, severity in absent])


def _layout(name: str, file_list: AnyPath | None) -> Layout:
    if name not in LAYOUTS:
        near = nearest(str(name).lower(), LAYOUTS, 0.5)
        raise ConfigError(f"Unknown data set {name!r}.{near} Known: {', '.join(LAYOUTS)}.")
    layout = LAYOUTS[name]
    if file_list is None:
        return layout
    if layout.read is not read_list:
        raise ConfigError(f"file_list= does not go with {name}, whose labels are not in such a list.")
    return replace(layout, places={name: (os.fspath(file_list),)})


def _choice(corruptions: Sequence[str] | None, severities: Sequence[int] | None) -> list[tuple[str, int]]:
    corruptions = CORRUPTIONS if corruptions is None else corruptions
    chosen = [(c, s) for c in corruptions for s in ((SEVERITY,) if severities is None else severities)]
    if not chosen:
        raise ConfigError("No corruption or no severity is given: name at least one of each.")
    for corruption, severity in chosen:
        require_valid(corruption, severity, 0, None)
    return chosen


def _wanted(
    name: str,
    layout: Layout,
    corruptions: Sequence[str] | None,
    severities: Sequence[int] | None,
    domains: Sequence[str] | None,
) -> Sequence[tuple[str, int | None]]:
    """Domains on disk by name and severity."""
    if domains is not None and (layout.severities or len(layout.places) == 1):
        raise ConfigError(f"domains= does not go with {name}; that is for office-home.")
    if layout.severities:
        return _choice(corruptions, severities)
    if corruptions is not None or severities is not None:
        also = " without corruptions=, which are made on the fly" if len(layout.places) == 1 else ""
        raise ConfigError(f"{name} has no corruptions on disk: severities= makes no sense{also}.")
    chosen = list(layout.places if domains is None else domains)
    for domain in chosen:
        if domain not in layout.places:
            near = nearest(str(domain), layout.places, 0.5)
            raise ConfigError(f"{name} has no domain {domain!r}.{near} There are: {', '.join(layout.places)}.")
    return [(domain, None) for domain in chosen]


def _columns(name: str, names: Sequence[str], head: int | None) -> list[int] | None:
    """The columns of a head that the labels stand for; None: the head has these columns and no others."""
    imagenet = {wnid: column for column, wnid in enumerate(synsets())}
    strangers = [folder for folder in names if folder not in imagenet]
    if head == len(names) or (head is None and (strangers or len(names) == len(imagenet))):
        return None
    if not strangers and head in (None, len(imagenet)):
        return [imagenet[wnid] for wnid in names]
    other = ""
    if name == "folder" and head == len(imagenet):
        other = f", or name all folders by ImageNet's wnids, like {synsets()[0]} (not so: {some(strangers)})"
    raise ConfigError(
        f"The head of the model has {head} classes, and {name} has {len(names)}: give a model for these{other}."
    )


def _open_all(rows: list[Row], console: Console | None) -> None:
    """Note the pictures that cannot be decoded."""

    def unreadable(file: Path) -> bool:
        try:
            read_rgb(file)
        except UnreadableError:
            return True
        return False

    quiet = console is None or not console.is_terminal
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        with Progress(console=console, disable=quiet, transient=True) as progress:
            task = progress.add_task("reading", total=sum(len(row.paths) for row in rows))
            for row in rows:
                found = []
                for path, broken in zip(row.paths, pool.map(unreadable, [row.where / path for path in row.paths])):
                    progress.advance(task)
                    found += [path] if broken else []
                if found:
                    row.problems.append(f"{len(found)} pictures cannot be read ({some(found)})")
    finally:  # after Ctrl-C too
        pool.shutdown(cancel_futures=True)
