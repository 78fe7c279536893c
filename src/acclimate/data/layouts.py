"""The layouts of the known data sets on disk, and functions that read them without opening an image."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from timm.data import ImageNetInfo

from ..errors import ConfigError, InputError, require_whole, shorten_list, suggest
from .corruptions import EXTRA, GROUPS, SEVERITIES
from .disk import open_array
from .domains import DomainKey
from .folder import PROTOCOL
from .imagefile import has_image_name, is_folder, search
from .preprocess import Input, Preprocess


@dataclass
class Row:
    """One domain as it is on disk."""

    key: DomainKey
    where: Path
    expected: int | None = None  # number of images; None: any number
    paths: list[str] = field(default_factory=list)  # of image files, relative to `where`
    labels: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)  # images that cannot be decoded, each with the reason


# Readers: each fills in one row, given the root of the data set, its layout and the names of its classes.


def read_tree(row: Row, root: Path, layout: Layout, names: Sequence[str]) -> None:
    """Read a folder for each class, with its images in the order of `ImageFolder`."""
    if not row.where.is_dir():
        row.problems.append(_missing(row.where, root))
        return
    counts: Counter[str] = Counter()
    found = search(row.where, names)
    for label, name in enumerate(names):
        images = found.images[name]
        row.paths += images
        row.labels += [label] * len(images)
        counts[name] = len(images)
    row.problems += found.problems()
    if not row.paths:
        row.problems.append(_no_tree(row.where, names))
        return
    empty = [name for name in names if not counts[name]]
    if empty:
        row.problems.append(f"{len(empty)} of {len(names)} classes have no images ({shorten_list(empty)})")
    if layout.count not in (None, len(names)):
        row.problems.append(f"{len(names)} classes instead of {layout.count}")
    strangers = sorted(set(_entries(row.where)[0]) - set(names))
    if strangers:
        shown = shorten_list([f"{name!r}{suggest(name, empty, 0.8)}" for name in strangers[:5]])
        row.problems.append(f"{len(strangers)} folders are none of its classes ({shown})")
    odd = [f"{name} {counts[name]}" for name in names if counts[name] and layout.each not in (None, counts[name])]
    if odd:
        row.problems.append(f"{len(odd)} classes do not have {layout.each} images ({shorten_list(odd)})")
    elif row.expected not in (None, len(row.paths)) and not empty:
        row.problems.append(f"{len(row.paths)} images instead of {row.expected}")


def read_list(row: Row, root: Path, layout: Layout, names: Sequence[str]) -> None:
    """Read a file list, with one path from the root and one label per line.

    All labels beyond the classes become one label, which means no class.
    """
    file, row.where = row.where, root
    if not os.path.isfile(file):  # a pipe would wait for its writer
        row.problems.append(f"{_missing(file, root)}. Another list can be given with file_list=")
        return
    try:
        lines = [line for line in os.fsdecode(file.read_bytes()).split("\n") if line.strip()]
    except OSError as error:
        row.problems.append(f"{file} cannot be read ({error.strerror})")
        return
    gone = []
    for line in lines:
        path, _, label = line.strip().rpartition(" ")
        path = os.path.normpath(path.strip())
        if not label.isdecimal() or len(label) > 9 or path.startswith(("/", "..")):
            row.problems.append(f"{file} has the line {line!r}: expected a path from {root} and a label")
            row.paths, row.labels = [], []
            return
        if os.path.isfile(root / path):
            row.paths.append(path)
            row.labels.append(min(int(label), len(names)))
        else:
            gone.append(path)
    row.expected = len(lines)
    if gone or not lines:
        row.problems.append(f"{len(gone)} of the {len(lines)} images in {file} are not there ({shorten_list(gone)})")


def read_arrays(row: Row, root: Path, layout: Layout, names: Sequence[str]) -> None:
    """Read an array with five severities one after another, and an array with their labels."""
    for file in (row.where, root / "labels.npy"):
        if not file.is_file():
            row.problems.append(_missing(file, root))
            return
    try:
        images = len(open_array(row.where))
        labels = np.load(root / "labels.npy", allow_pickle=False)
    except (InputError, OSError, ValueError, EOFError) as error:
        row.problems.append(str(error).rstrip("."))
        return
    if labels.dtype.kind not in "iu" or labels.shape != (images,) or not images or images % len(SEVERITIES):
        row.problems.append(
            f"{row.where.name} has {images} images, and labels.npy is {labels.dtype} {labels.shape}: expected five "
            "severities of equal length, and a label for each image"
        )
    elif not 0 <= labels.min() <= labels.max() < len(names):
        row.problems.append(f"labels.npy goes from {labels.min()} to {labels.max()}: expected 0 to {len(names) - 1}")
    else:
        row.labels = np.split(labels, len(SEVERITIES))[(row.key.severity or 1) - 1].tolist()
        if row.expected != len(row.labels):
            row.problems.append(f"{len(row.labels)} images of each severity instead of {row.expected}")


def _entries(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted folders and files in a folder.

    Hidden entries and entries that archives leave behind are left out.
    """
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry.name, is_folder(entry)) for entry in found if not entry.name.startswith((".", "__")))
    except OSError:
        return [], []
    return [name for name, is_folder in entries if is_folder], [name for name, is_folder in entries if not is_folder]


def _missing(where: Path, root: Path) -> str:
    """Say what is missing, and what exists instead, at the first level of the path that is missing."""
    if not root.is_dir():
        near = suggest(root.name, _entries(root.parent)[0], 0.6).strip()
        return f"There is no folder {root}" + (f" ({near})" if near else "")
    while not where.parent.is_dir():
        where = where.parent
    found = [name for names in _entries(where.parent) for name in names]
    return f"{where} is missing.{suggest(where.name, found, 0.6)} Found there: {shorten_list(found) or 'nothing'}"


def _no_tree(where: Path, names: Sequence[str]) -> str:
    folders, files = _entries(where)
    flat = [file for file in files if has_image_name(file)]
    if flat and flat[0].startswith("ILSVRC2012_val_"):
        return (
            f"{where} has its {len(flat)} images unsorted in one folder, where nothing says their classes. To sort them, "
            "put ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz into a folder and call "
            'torchvision.datasets.ImageNet(folder, split="val")'
        )
    if flat:
        return f"{where} has {len(flat)} images in no folder: each class needs one"
    wanted = f"folders like {shorten_list(list(names[:2]))}" if names else "folders of classes"
    return f"{where} has no images in {wanted}. Found there: {shorten_list(folders + files) or 'nothing'}"


# The table


@dataclass(frozen=True)
class Layout:
    """The layout of a data set on disk, and the numbers of classes and images that it must have."""

    about: str
    shape: str  # in words
    source: str  # where to get it
    places: dict[str, tuple[str, ...]]  # possible places of each domain, relative to the root
    classes: Callable[[], Sequence[str]] | None = None  # names by label; None: the names of the folders, in order
    count: int | None = None  # number of classes
    each: int | None = None  # images in a class
    total: dict[str, int] = field(default_factory=dict)  # images in a domain
    severities: bool = False  # whether its domains are corruptions
    read: Callable[[Row, Path, Layout, Sequence[str]], None] = read_tree
    preprocess: Callable[[Input], Preprocess] = Input.photographs

    def place(self, root: Path, key: DomainKey) -> Path:
        """Return the first of the possible places of a domain that exists, or else the usual one."""
        places = [root / place for place in self.places[key.name]]
        found = next((place for place in places if place.exists()), places[0])
        return found / str(key.severity) if self.severities and self.read is read_tree else found


def survey(layout: Layout, root: Path, wanted: Iterable[DomainKey]) -> tuple[list[Row], Sequence[str]]:
    """Return the domains as they are on disk, and the names of the classes by label."""
    rows = [Row(key, layout.place(root, key), layout.total.get(key.name)) for key in wanted]
    found = {name for row in rows for name in _entries(row.where)[0]} if layout.classes is None else ()
    names = layout.classes() if layout.classes is not None else sorted_classes(found)
    numbered = pairwise(names) if found and are_numbers(names) else ()
    same = [f"{one} and {other}" for one, other in numbered if int(one) == int(other)]
    for row in rows:
        if same:
            row.problems.append(f"folders have the number of one class ({shorten_list(same)})")
            continue
        row.expected = layout.each * len(names) if layout.each else row.expected
        layout.read(row, root, layout, names)
    return rows, names


def are_numbers(names: Collection[str]) -> bool:
    """Return whether all names of classes are whole numbers, like 2, 10 or 007."""
    return all(name.isascii() and name.isdecimal() for name in names)


def sorted_classes(names: Collection[str]) -> list[str]:
    """Return names of classes in numerical order if all are numbers, and otherwise in the order of `ImageFolder`."""
    return sorted(names, key=lambda name: (int(name), name)) if are_numbers(names) else sorted(names)


@cache
def synsets(which: str = "imagenet") -> tuple[str, ...]:
    """Return the WordNet numbers of the 1000 classes of ImageNet, or of the 200 classes of a subset of it.

    The subsets are "imagenet_r" and "imagenet_a". The lists are those of timm.
    """
    if which == "imagenet":
        return tuple(ImageNetInfo().label_names())
    return tuple((resources.files("timm.data") / "_info" / f"{which}_synsets.txt").read_text().split())


@cache
def numerals(count: int) -> tuple[str, ...]:
    """Return classes that are named by their numbers, in numerical order: "2" comes before "10"."""
    return tuple(map(str, range(count)))


GROUP_OF = {name: group for group, names in {**GROUPS, "extra": EXTRA}.items() for name in names}
OFFICE = {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}
CIFAR = Layout(
    "CIFAR-10's test images under 15 (and 4 extra) corruptions",
    "<corruption>.npy with 5 x 10000 images, and labels.npy",
    "https://zenodo.org/records/2535967 (CIFAR-10-C.tar)",
    {name: (f"{name}.npy",) for name in GROUP_OF},
    partial(numerals, 10),
    total=dict.fromkeys(GROUP_OF, 10_000),
    severities=True,
    read=read_arrays,
    preprocess=lambda model: model.stored(32),
)

LAYOUTS = {
    "imagenet-c": Layout(
        "ImageNet's validation images under 15 (and 4 extra) corruptions",
        "<corruption>/<severity>/<wnid>/*.JPEG",
        "https://zenodo.org/records/2235448 (noise.tar, blur.tar, weather.tar, digital.tar)",
        {name: (name, f"{group}/{name}") for name, group in GROUP_OF.items()},  # in one folder, or one per group
        synsets,
        each=50,
        severities=True,
        preprocess=lambda model: model.stored(224),
    ),
    "imagenet": Layout(
        "ImageNet's validation images",
        "<wnid>/*.JPEG, or val/<wnid>/*.JPEG",
        "https://www.image-net.org after registration (ILSVRC2012_img_val.tar)",
        {"imagenet": ("val", ".")},
        synsets,
        each=50,
    ),
    "imagenet-r": Layout(
        "renditions (art, toys, sketches, ...) of 200 classes",
        "<wnid>/*.jpg",
        "https://github.com/hendrycks/imagenet-r (imagenet-r.tar)",
        {"imagenet-r": (".",)},
        partial(synsets, "imagenet_r"),
        total={"imagenet-r": 30_000},
    ),
    "imagenet-a": Layout(
        "photographs of 200 classes that misled a ResNet-50",
        "<wnid>/*.jpg",
        "https://github.com/hendrycks/natural-adv-examples (imagenet-a.tar)",
        {"imagenet-a": (".",)},
        partial(synsets, "imagenet_a"),
        total={"imagenet-a": 7_500},
    ),
    "imagenet-v2": Layout(
        "a second validation set; its three versions are three folders",
        "<number of the class, 0 to 999>/*.jpeg",
        "https://huggingface.co/datasets/vaishaal/ImageNetV2 (imagenetv2-matched-frequency.tar.gz)",
        {"imagenet-v2": (".",)},
        partial(numerals, 1000),
        each=10,
    ),
    "imagenet-sketch": Layout(
        "sketches in black and white",
        "<wnid>/*.JPEG",
        "https://github.com/HaohanWang/ImageNet-Sketch",
        {"imagenet-sketch": (".",)},
        synsets,
        total={"imagenet-sketch": 50_889},
    ),
    "visda-2021": Layout(
        "validation images of the VisDA 2021 challenge",
        "val_filelists/imagenet_c_r.txt with lines of a path, from the root, and a label",
        "https://github.com/VisionLearningGroup/visda21-dev (val_data.zip, and the kit's file lists)",
        {"visda-2021": ("val_filelists/imagenet_c_r.txt",)},
        synsets,
        read=read_list,
        preprocess=Input.squashed,
    ),
    "office-home": Layout(
        "65 things of office and home in four styles",
        "<Art, Clipart, Product, Real World>/<class>/*.jpg",
        "https://www.hemanthdv.org/officeHomeDataset.html",
        {name: (name, name.replace(" ", "_"), name.replace(" ", "")) for name in OFFICE},
        count=65,
        total=OFFICE,
    ),
    "cifar-10-c": CIFAR,
    "cifar-100-c": replace(
        CIFAR,
        about="CIFAR-100's test images under 15 (and 4 extra) corruptions",
        source="https://zenodo.org/records/3555552 (CIFAR-100-C.tar)",
        classes=partial(numerals, 100),
    ),
    "folder": Layout(
        "any images; a class's label is its place among the sorted names, or numbers",
        "<class>/*, <domain>/<class>/*, <corruption>/<severity>/<class>/*, or images and a CSV file of labels",
        "wherever you have them",
        {"folder": (".",)},
    ),
}


# Folders of other shapes


def with_domains(layout: Layout, domains: Sequence[str]) -> Layout:
    """Return the layout of a folder with a sub-folder for each domain."""
    if not domains or any(domain in ("", ".", "..") or Path(domain).name != domain for domain in domains):
        raise ConfigError(f"domains={list(domains)!r}: give names of sub-folders, each with its folders of classes.")
    return replace(layout, shape="<domain>/<class>/*", places={domain: (domain,) for domain in domains})


class Tree(NamedTuple):
    """A tree like that of ImageNet-C, which `acclimate corrupt` writes, as far as it is there."""

    corruptions: list[str]  # in their usual order
    severities: list[int]  # of any of the corruptions
    side: int | None  # of the squares to which its images were cropped; None: they have any size

    def layout(self, layout: Layout) -> Layout:
        """Return the layout of a folder of this shape."""
        side = self.side
        places: dict[str, tuple[str, ...]] = {name: (name,) for name in GROUP_OF}
        how = Input.photographs if side is None else lambda model: model.stored(side)
        shape = "<corruption>/<severity>/<class>/*"
        return replace(layout, shape=shape, places=places, severities=True, preprocess=how)


def find_tree(root: Path) -> Tree | None:
    """Return the tree of corrupted images that a folder is, or None for any other folder.

    All folders of such a tree have names of corruptions, all folders in these are numbers from 1 to 5, and no images lie
    beside them.
    """
    corruptions, files = _entries(root)
    below = [_entries(root / name) for name in corruptions]
    severities = {severity for folders, _ in below for severity in folders}
    beside = any(map(has_image_name, [*files, *(file for _, others in below for file in others)]))
    if beside or not severities or not severities <= set(map(str, SEVERITIES)) or not GROUP_OF.keys() >= set(corruptions):
        return None
    try:
        made = json.loads((root / PROTOCOL).read_text()) if PROTOCOL in files else {}
        side = made["resize_crop"][1] if made.get("resize_crop") else None
        require_whole(1, optional=True, side=side)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, ConfigError) as error:
        raise InputError(f"{root / PROTOCOL} is damaged ({error}): make the tree again.") from None
    return Tree([name for name in GROUP_OF if name in corruptions], sorted(map(int, severities)), side)
