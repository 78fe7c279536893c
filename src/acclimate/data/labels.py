"""Labels of images in a CSV file, for a folder whose images are not sorted into folders of classes.

    file,label
    a.jpg,cat
    b.jpg,dog

A file is a path from the folder. A label is the name or the index of a class.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InputError, printable, shorten_list, suggest
from .imagefile import AnyPath, has_image_name, search
from .layouts import Layout, Row, are_numbers, numerals, synsets


def labelled(layout: Layout, file: AnyPath, head: int | None = None, told: Sequence[str] = ()) -> Layout:
    """Return the layout of a folder whose labels are in a CSV file.

    Args:
        layout: The layout of a folder.
        file: The CSV file.
        head: The number of classes of the model's head, if it is known.
        told: The names of the model's classes, if it says them.
    """
    labels = read_label_file(file)
    try:
        names = _classes(set(labels.values()), head, told)
    except InputError as error:
        raise InputError(f"{printable(file)}: {error}") from None
    shape = "images, and a CSV file with the columns file and label"
    return replace(layout, shape=shape, classes=lambda: names, read=partial(_read_labelled, labels))


def read_label_file(file: AnyPath) -> dict[str, str]:
    """Return the labels in a CSV file by the paths of the images. Indices of classes have no leading zeros.

    The columns are those with the titles `file` and `label`, or else the first two. Without these titles, the first line is
    a header if it does not begin with the name of an image.

    Raises:
        InputError: If the file cannot be read, a line is not complete, or an image has two lines.
    """
    if not os.path.isfile(file):  # a pipe would wait for its writer
        raise InputError(f"There is no file {printable(file)} with labels.")
    try:
        with open(file, newline="", encoding="utf-8-sig") as text:
            reader = csv.reader(text)
            lines = [(reader.line_num, [cell.strip() for cell in line]) for line in reader if any(map(str.strip, line))]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{printable(file)} cannot be read as a CSV file ({printable(error)}).") from None
    titles = [title.lower() for title in lines[0][1]] if lines else []
    columns = (titles.index("file"), titles.index("label")) if {"file", "label"} <= set(titles) else (0, 1)
    labels: dict[str, str] = {}
    for number, line in lines[bool(titles) and not has_image_name(os.path.basename(titles[columns[0]])) :]:
        path, label = (line[column] if column < len(line) else "" for column in columns)
        where = f"{printable(file)}, line {number}"
        if not path or not label:
            raise InputError(f"{where}: expected a file and a label, and found {printable(','.join(line))!r}.")
        path = os.path.normpath(path)
        if path in labels:
            raise InputError(f"{where}: {printable(path)} has a label already. Give each image one line.")
        labels[path] = label
    if not labels:
        raise InputError(f"{printable(file)} has no labels: expected lines of a file and a label.")
    return {path: str(int(label)) for path, label in labels.items()} if are_numbers(labels.values()) else labels


def class_names(model: nn.Module) -> Sequence[str]:
    """Return the names of the classes that a model says: of timm, of transformers, or of a zero-shot model."""
    described: Any = model
    config = getattr(described, "pretrained_cfg", None) or {}
    told = getattr(getattr(described, "config", None), "id2label", None) or {}
    found = getattr(described, "class_names", None) or config.get("label_names") or [told[i] for i in sorted(told)]
    return [str(name) for name in found]


def _classes(labels: set[str], head: int | None, told: Sequence[str]) -> Sequence[str]:
    """Return the names of all classes, by label.

    Indices are columns of the head. Names are those of the model if it says any, and otherwise sorted.
    """
    if are_numbers(labels):
        highest = max(map(int, labels))
        if head is not None and highest >= head:
            raise InputError(f"The label {highest} is out of range. The classes of the model are 0 to {head - 1}.")
        return numerals(highest + 1 if head is None else head)
    placeholders = all(name == f"LABEL_{index}" for index, name in enumerate(told))  # of transformers
    if len(told) != head or placeholders or labels <= set(synsets()):
        return sorted(labels)
    unknown = sorted(labels - set(told))
    if unknown:
        shown = shorten_list([f"{name!r}{suggest(name, told, 0.6)}" for name in unknown])
        raise InputError(f"{len(unknown)} labels are no classes of the model ({shown}). It has: {shorten_list(told)}.")
    return told


def _read_labelled(labels: dict[str, str], row: Row, root: Path, layout: Layout, names: Sequence[str]) -> None:
    """Read all images below a folder, in the order of their names, with the labels of a CSV file."""
    found = search(row.where, [""])
    places = {name: label for label, name in enumerate(names)}
    row.expected = len(labels)
    row.paths = [path for path in found.images[""] if path in labels]
    row.labels = [places[labels[path]] for path in row.paths]
    row.problems += found.problems()
    gone = sorted(labels.keys() - set(row.paths))
    if gone:
        row.problems.append(f"{len(gone)} of the {len(labels)} files with a label are not there ({shorten_list(gone)})")
    others = sorted(set(found.images[""]) - labels.keys())
    if others:
        row.problems.append(f"{len(others)} images have no label ({shorten_list(others)})")
