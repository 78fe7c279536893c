"""Data sets by name, in their usual layouts on disk.

    data = open_data("imagenet-c", "/data/ImageNet-C", model)
    adapter = acclimate.adapt(model, "dct", classes=data.classes)
    stream = Stream(data.domains[0])

The label of an image is the position of its class in the full list of the data set's classes, whichever folders exist. If
something is missing or has another name, an error says what was expected, what was found and where to get it.

| images | preprocessing |
|---|---|
| photographs | shorter side resized to 256, central crop of 224 x 224; for a model of another size by its own `crop_pct` |
| ImageNet-C, stored at 224 x 224 | none; resized for a model of another size |
| VisDA-2021 | resized to 256 x 256, central crop of 224 x 224; for a model of another size in proportion |
| CIFAR-C, stored at 32 x 32 | none; resized for a model of another size |

Resizing is bilinear. The normalisation is that of the model.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from torch import nn

from ..errors import ConfigError, InputError, UnreadableError, printable, shorten_list, suggest
from . import bundled
from .corruptions import CORRUPTIONS, SEVERITIES, Corruption, require_valid
from .disk import Arrays, Files, read_rgb
from .domains import CLEAN, Corrupted, Domain, DomainKey, Subset
from .imagefile import AnyPath
from .labels import class_names, labelled
from .layouts import LAYOUTS, Layout, Row, are_numbers, find_tree, read_list, survey, synsets, with_domains
from .preprocess import Preprocess, input_of

FOLDER = "folder"
SEVERITY = 5  # as in the papers
SHOWN = (CLEAN, *CORRUPTIONS[::2])  # the corruptions of a bench by default: every second one, in the usual order


@dataclass(frozen=True, repr=False)
class Data:
    """A data set with its domains, ready for streams."""

    name: str
    domains: list[Domain]
    class_names: Sequence[str]  # by label: the names of the folders, or numbers
    classes: list[int] | None = None  # columns of the model's head, for `acclimate.adapt`; None: all
    unknown: int | None = None  # the label of images of no class, for which any prediction is wrong
    opener: Callable[[DomainKey], Domain] | None = field(default=None, compare=False)  # opens other domains
    held_out: Domain | None = None  # clean images that no stream shows, for what is learned from the source data
    severity: int = SEVERITY  # the default severity of a corruption

    @property
    def num_classes(self) -> int:
        """The number of classes. Labels are below it, or equal to `unknown`."""
        return len(self.class_names)

    def domain(self, name: str = CLEAN, severity: int | None = None) -> Domain:
        """Return one domain: one of `domains`, or another domain of the same images."""
        key = DomainKey(name, None if name == CLEAN else severity or self.severity)
        found = next((domain for domain in self.domains if domain.key == key), None)
        if found is not None:
            return found
        if self.opener is None:
            raise ConfigError(f"{self.name} has no domain {key}. There are: {', '.join(str(d.key) for d in self.domains)}.")
        return self.opener(key)

    def pairs(self) -> list[tuple[Domain, Domain]]:
        """Return all pairs of a source domain and another target domain. Office-Home has 12."""
        return list(itertools.permutations(self.domains, 2))

    def __repr__(self) -> str:
        names = [str(domain.key) for domain in self.domains]
        shown = ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)} domains)"
        images = sum(len(domain.labels) for domain in self.domains)
        part = "" if self.classes is None else ", a part of the model's"
        return f"<Data {self.name}: {shown}; {images} images; {self.num_classes} classes{part}>"


@dataclass(frozen=True)
class Selection:
    """The part of a data set to open, and how images are corrupted on the fly.

    Args:
        corruptions: The corruptions to open (ImageNet-C, CIFAR-C), or to make on the fly (clean images). Default: the 15 of
            ImageNet-C; for the bundled images `SHOWN`, and none for other clean images. "clean" selects the clean images
            themselves.
        severities: The severities of each corruption. Default: 5.
        domains: The domains of Office-Home to open (default: all four), or sub-folders of a folder that are its domains.
        images: The number of images of each domain, always the same ones. Default: all, for the bundled images 512.
        partial: Whether to accept a data set that is incomplete, or that has additional files, which are ignored.
        constants: The strengths of the severities of corruptions made on the fly: "imagenet-c" or "cifar-10-c". Default:
            chosen by the size of the images.
        seed: The seed of corruptions made on the fly.
        frost: A folder with photographs of ice for the corruption frost. Default: generated ice.
        file_list: The file list of VisDA-2021, as a path from the root. Labels from 1000 on mean no class (`Data.unknown`).
        labels: A CSV file with the columns file and label, for a folder whose images are in no folders of classes. A label
            is the name or the index of a class.
    """

    corruptions: Sequence[str] | None = None
    severities: Sequence[int] | None = None
    domains: Sequence[str] | None = None
    images: int | None = None
    partial: bool = False
    constants: str | None = None
    seed: int = 0
    frost: AnyPath | None = None
    file_list: AnyPath | None = None
    labels: AnyPath | None = None

    def keys(self, corruptions: Sequence[str], severity: int) -> list[DomainKey]:
        """Return the keys of the selected corruptions and severities.

        The arguments are the defaults. Clean images have no severity.
        """
        names = corruptions if self.corruptions is None else self.corruptions
        severities = (severity,) if self.severities is None else self.severities
        keys = [DomainKey(name, None if name == CLEAN else s) for name in names for s in severities]
        if not keys:
            raise ConfigError("No corruption or no severity is given: name at least one of each.")
        for key in keys:
            if key.severity is not None:
                require_valid(key.name, key.severity, self.seed, self.constants)
        return list(dict.fromkeys(keys))

    def corruption(self, key: DomainKey) -> Corruption | None:
        """Return the corruption of a key, made on the fly, or None for clean images."""
        if key.severity is None:
            return None
        ice = None if self.frost is None else os.fspath(self.frost)
        return Corruption(key.name, key.severity, self.seed, self.constants, ice)

    def sampled(self, domain: Domain) -> Domain:
        """Return a subset of a domain with the selected number of images."""
        return domain if self.images is None else Subset.sample(domain, self.images)


@dataclass(frozen=True)
class DataSet:
    """An entry in the catalogue of data sets.

    Args:
        about: What the data set shows.
        shape: What is below its root, in words.
        origin: Where to get it.
        open: A function that opens it below a root for a model, or for a given preprocessing.
        has_root: Whether it is a folder on disk.
    """

    about: str
    shape: str
    origin: str
    open: Callable[[Path, nn.Module | Preprocess, Selection, Sequence[float] | None, Sequence[float] | None], Data]
    has_root: bool = True


def data_sets() -> dict[str, DataSet]:
    """Return the catalogue of data sets, by name."""
    about, shape = "Fashion-MNIST's test images, 28 x 28 pixels", "nothing: they are part of acclimate"
    own = {bundled.NAME: DataSet(about, shape, "this package", _open_bundled, has_root=False)}
    return own | {
        name: DataSet(layout.about, layout.shape, layout.source, partial(_open_layout, name))
        for name, layout in LAYOUTS.items()
    }


def find_data_set(name: str, root: AnyPath | None) -> DataSet:
    """Return a data set of the catalogue, and refuse an unknown one, and one whose folder is not there."""
    known = data_sets()
    if name not in known:
        raise ConfigError(f"Unknown data set {name!r}.{suggest(str(name).lower(), known, 0.5)} Known: {', '.join(known)}.")
    if known[name].has_root != (root is not None):
        raise ConfigError(
            f"data={name!r}: say in which folder it is (root=; on the command line --root)."
            if root is None
            else f"data={name!r} is part of acclimate: leave out root=."
        )
    if root is not None and not Path(root).is_dir():
        raise check_data(name, root).error()
    return known[name]


def shows_corruptions(name: object, root: AnyPath | None, domains: Sequence[str] | None = None) -> bool:
    """Return whether a bench shows the corruptions `SHOWN` by default, made on the fly.

    It does so of the bundled images, and of a folder that has neither domains nor corruptions of its own.
    """
    return name == bundled.NAME or (name == FOLDER and domains is None and (root is None or not find_tree(Path(root))))


def open_data(
    name: str,
    root: AnyPath | None,
    model: nn.Module | Preprocess,
    selection: Selection | None = None,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Data:
    """Open a data set with the preprocessing of a model.

    Args:
        name: A name in the catalogue, which `acclimate data list` prints.
        root: The folder of the data set; None for the bundled images.
        model: A model, which determines size and normalisation of the images, and which columns of its head the labels are.
            Or a `Preprocess`, which is used as it is; the classes of ImageNet are then columns of a head of 1000.
        selection: The part of the data set to open. Default: its usual domains with all images.
        mean: The mean of the normalisation, for a model whose configuration does not contain it.
        std: The standard deviation of the normalisation, for a model whose configuration does not contain it.
    """
    entry = find_data_set(name, root)
    if isinstance(model, Preprocess) and (mean is not None or std is not None):
        raise ConfigError("mean= and std= go with a model; a Preprocess has its own.")
    return entry.open(Path(root or "."), model, selection or Selection(), mean, std)


def _open_layout(
    name: str,
    root: Path,
    model: nn.Module | Preprocess,
    chosen: Selection,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Data:
    """Open a data set on disk that has one of the known layouts."""
    layout, chosen = _layout(name, root, chosen)
    told: Sequence[str] = ()
    if isinstance(model, Preprocess):
        preprocess, head = model, None
    else:
        takes = input_of(model, mean=mean, std=std)
        preprocess, head, told = layout.preprocess(takes), takes.classes, class_names(model)
    if chosen.labels is not None:
        layout = labelled(layout, chosen.labels, head, told)
    clean = not layout.severities and len(layout.places) == 1  # whether the images can be corrupted on the fly
    on_the_fly = clean and chosen.corruptions is not None
    if not on_the_fly and (chosen.constants is not None or chosen.frost is not None):
        raise ConfigError("constants= and frost= are for corruptions that are made on the fly, of clean images.")
    made = chosen.keys(CORRUPTIONS, SEVERITY) if on_the_fly else [None]
    wanted = _wanted(name, layout, replace(chosen, corruptions=None, severities=None) if on_the_fly else chosen)
    rows, names = survey(layout, root, wanted)
    layout = replace(layout, classes=lambda: names)  # of domains that are opened later, too
    report = DataReport(name, root, layout, rows)
    if not all(row.labels for row in rows) or (report.problems and not chosen.partial):
        raise report.error()

    def opened(row: Row, key: DomainKey | None) -> Domain:
        severity = row.key.severity
        if severity is not None and not row.paths:
            start = SEVERITIES.index(severity) * len(row.labels)
            return Arrays(row.where, row.labels, preprocess, name=row.key.name, severity=severity, start=start)
        corruption = None if key is None else chosen.corruption(key)
        called = CLEAN if on_the_fly else row.key.name
        return Files(row.where, row.paths, row.labels, preprocess, name=called, severity=severity, corruption=corruption)

    def open_one(key: DomainKey) -> Domain:
        if clean:
            return chosen.sampled(
                Files(rows[0].where, rows[0].paths, rows[0].labels, preprocess, corruption=chosen.corruption(key))
            )
        if not layout.severities or key.severity is None:
            raise ConfigError(f"{name} has no domain {key}: it has no clean images to corrupt.")
        found, _ = survey(layout, root, [key])
        if not found[0].labels or (found[0].problems and not chosen.partial):
            raise DataReport(name, root, layout, found).error()
        return chosen.sampled(opened(found[0], None))

    domains = [chosen.sampled(opened(row, key)) for row in rows for key in made]
    unknown = len(names) if layout.read is read_list else None
    return Data(name, domains, names, _columns(name, names, head), unknown, open_one)


def _open_bundled(
    root: Path,
    model: nn.Module | Preprocess,
    chosen: Selection,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Data:
    """Open the bundled images, except for those on which options were tuned."""
    if any(option is not None for option in (chosen.domains, chosen.file_list, chosen.labels, chosen.frost)):
        raise ConfigError("domains=, file_list=, labels= and frost= do not go with the bundled images.")
    everything = bundled.images()
    most = len(everything.labels) - bundled.FOR_TUNING
    count = bundled.IMAGES if chosen.images is None else chosen.images
    if count > most:
        raise ConfigError(f"images={count}: at most {most}; the options were tuned on the others.")
    takes = model if isinstance(model, Preprocess) else input_of(model, mean=mean, std=std)
    if not isinstance(takes, Preprocess) and (takes.size, takes.classes) != (bundled.SIZE, len(bundled.CLASSES)):
        raise ConfigError(
            f"The bundled images have {bundled.SIZE} x {bundled.SIZE} pixels and {len(bundled.CLASSES)} classes; this model "
            f"takes {takes.size} x {takes.size} and has {takes.classes}: give data of its own (data=, root=)."
        )

    def opened(key: DomainKey) -> Domain:
        shown = Corrupted(
            everything, *key, mean=takes.mean, std=takes.std, seed=chosen.seed,
            constants=chosen.constants,
        )  # fmt: skip
        return Subset.sample(shown, count)

    domains = [opened(key) for key in chosen.keys(SHOWN, SEVERITY)]
    unseen = Subset.sample(Corrupted(everything, mean=takes.mean, std=takes.std), bundled.FOR_TUNING, skip=most)
    return Data(bundled.NAME, domains, bundled.CLASSES, opener=opened, held_out=unseen)


@dataclass
class DataReport:
    """The domains of a data set that exist on disk, and the problems that were found."""

    name: str
    root: Path
    layout: Layout
    rows: list[Row] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # domains that do not exist and were not requested

    @property
    def problems(self) -> list[str]:
        """The problems, each with the domains that have it."""
        where: dict[str, list[str]] = {}
        for row in self.rows:
            for problem in row.problems:
                where.setdefault(printable(problem), []).append(str(row.key))
        everywhere = len(self.rows)
        return [p if len(titles) == everywhere else f"{shorten_list(titles)}: {p}" for p, titles in where.items()]

    @property
    def usable(self) -> bool:
        """Whether the data set can be opened without `partial`."""
        return not self.problems

    def error(self, most: int = 5) -> InputError:
        """Return an error with up to `most` problems, the expected layout, and where to get the data."""
        partial = " What is there can be used with partial=True." if all(row.labels for row in self.rows) else ""
        more = f"; and {len(self.problems) - most} more" if len(self.problems) > most else ""
        return InputError(
            f"{printable(self.root)} cannot be used as {self.name}. {'; '.join(self.problems[:most])}{more}. "
            f"Expected: {self.layout.shape}. Get it from {self.layout.source}.{partial}"
        )


def check_data(
    name: str,
    root: AnyPath,
    *,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    domains: Sequence[str] | None = None,
    file_list: AnyPath | None = None,
    labels: AnyPath | None = None,
    open_images: bool = False,
    console: Console | None = None,
) -> DataReport:
    """Check which domains of a data set exist on disk. Problems of its images are in the report and are not raised.

    By default, the domains that `open_data` opens by default must exist, and others are checked if they exist.

    Args:
        name: The name of a data set in the catalogue.
        root: The folder of the data set.
        corruptions: The corruptions that must exist. Default: the 15 of ImageNet-C.
        severities: The severities that must exist. Default: 5.
        domains: The domains of Office-Home or of a folder that must exist. Default: all four of Office-Home.
        file_list: The file list of VisDA-2021, as a path from the root.
        labels: A CSV file with the labels of the images of a folder.
        open_images: Whether to decode every image file.
        console: A console, which shows progress if it is a terminal.
    """
    root = Path(root)
    layout, chosen = _layout(name, root, Selection(corruptions, severities, domains, file_list=file_list, labels=labels))
    if labels is not None:
        layout = labelled(layout, labels)
    wanted = _wanted(name, layout, chosen)
    absent = []
    if layout.severities and corruptions is None and severities is None:
        everything = [DomainKey(corruption, severity) for corruption in layout.places for severity in SEVERITIES]
        absent = [key for key in everything if key not in wanted and not layout.place(root, key).exists()]
        wanted = [which for which in everything if which not in absent]
    rows, _ = survey(layout, root, wanted)
    if open_images:
        _open_all(rows, console)
    return DataReport(name, root, layout, rows, [str(key) for key in absent])


def _layout(name: str, root: Path, chosen: Selection) -> tuple[Layout, Selection]:
    """Return the layout of a data set. Of a tree of corruptions, what is there is selected by default."""
    if name not in LAYOUTS:
        near = suggest(str(name).lower(), LAYOUTS, 0.5)
        raise ConfigError(f"Unknown data set {name!r} on disk.{near} Known: {', '.join(LAYOUTS)}.")
    layout = LAYOUTS[name]
    if chosen.file_list is not None:
        if layout.read is not read_list:
            raise ConfigError(f"file_list= does not go with {name}, whose labels are not in such a list.")
        layout = replace(layout, places={name: (os.fspath(chosen.file_list),)})
    if chosen.labels is not None and (name != FOLDER or chosen.domains is not None):
        raise ConfigError("labels= goes with data='folder', and not with domains=.")
    if name != FOLDER or chosen.labels is not None:
        return layout, chosen
    tree = find_tree(root)
    if tree is None:
        return layout if chosen.domains is None else with_domains(layout, chosen.domains), chosen
    if chosen.domains is not None:
        raise ConfigError(f"{printable(root)} is a tree of corruptions: choose with corruptions= instead of domains=.")
    names = tree.corruptions if chosen.corruptions is None else chosen.corruptions
    severities = tree.severities if chosen.severities is None else chosen.severities
    return tree.layout(layout), replace(chosen, corruptions=names, severities=severities)


def _wanted(name: str, layout: Layout, chosen: Selection) -> Sequence[DomainKey]:
    """Return the keys of the domains that must be on disk."""
    if chosen.domains is not None and name != FOLDER and (layout.severities or len(layout.places) == 1):
        raise ConfigError(f"domains= does not go with {name}; that is for office-home and folder.")
    if layout.severities:
        keys = chosen.keys(CORRUPTIONS, SEVERITY)
        if any(key.severity is None for key in keys):
            raise ConfigError(f"{name} has no clean images: leave out {CLEAN!r}, or take it from the clean data set.")
        return keys
    if chosen.corruptions is not None or chosen.severities is not None:
        also = " without corruptions=, which are made on the fly" if len(layout.places) == 1 else ""
        raise ConfigError(f"{name} has no corruptions on disk: severities= makes no sense{also}.")
    domains = list(layout.places if chosen.domains is None else chosen.domains)
    for domain in domains:
        if domain not in layout.places:
            near = suggest(str(domain), layout.places, 0.5)
            raise ConfigError(f"{name} has no domain {domain!r}.{near} There are: {', '.join(layout.places)}.")
    return [DomainKey(domain) for domain in domains]


def _columns(name: str, names: Sequence[str], head: int | None) -> list[int] | None:
    """Return the columns of a head that the labels are.

    None means that the labels are the columns.
    """
    imagenet = {wnid: column for column, wnid in enumerate(synsets())}
    strangers = [folder for folder in names if folder not in imagenet]
    if head == len(names) or (head is None and (strangers or len(names) == len(imagenet))):
        return None
    if not strangers and head in (None, len(imagenet)):
        return [imagenet[wnid] for wnid in names]
    other = ""
    if name == FOLDER and head is not None and are_numbers(names):
        if int(names[-1]) < head:
            return [int(number) for number in names]
        other = f", or number the folders from 0 to {head - 1} (there is {names[-1]})"
    elif name == FOLDER and head == len(imagenet):
        other = f", or name all classes by ImageNet's wnids, like {synsets()[0]} (not so: {shorten_list(strangers)})"
    raise ConfigError(
        f"The head of the model has {head} classes, and {name} has {len(names)}: give a model for these{other}."
    )


def _open_all(rows: list[Row], console: Console | None) -> None:
    """Decode all images, and add those that cannot be decoded to the problems."""

    def problem(file: Path) -> str | None:
        try:
            read_rgb(file)
        except UnreadableError as error:
            return str(error)
        return None

    quiet = console is None or not console.is_terminal
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        with Progress(console=console, disable=quiet, transient=True) as progress:
            task = progress.add_task("reading", total=sum(len(row.paths) for row in rows))
            for row in rows:
                found = []
                for path, text in zip(row.paths, pool.map(problem, [row.where / path for path in row.paths])):
                    progress.advance(task)
                    if text is not None:
                        found.append(path)
                        row.unreadable.append(text)
                if found:
                    row.problems.append(f"{len(found)} images cannot be read ({shorten_list(found)})")
    finally:  # also after Ctrl-C
        pool.shutdown(cancel_futures=True)
