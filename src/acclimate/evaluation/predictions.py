"""Predictions for images without labels, by a model that adapts to them."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..core.adapter import Adapter
from ..core.files import write_whole
from ..data.disk import Files
from ..data.imagefile import search
from ..data.labels import class_names
from ..data.preprocess import Preprocess
from ..errors import InputError, require_whole


class Prediction(NamedTuple):
    """The prediction of one image."""

    file: str  # its path below the folder
    label: int  # the predicted class, as a column of the logits
    name: str  # of the class, or nothing if the model does not say it
    probability: float


def unlabelled(root: str | os.PathLike[str], preprocess: Preprocess) -> Files:
    """Return all images of a folder and of the folders below it, in the order of their names.

    Raises:
        InputError: If there are none.
    """
    paths = search(root, [""]).images[""]
    if not paths:
        raise InputError(f"{os.fspath(root)}: there are no images in this folder or below it.")
    return Files(root, paths, np.full(len(paths), -1), preprocess, name=os.path.basename(os.path.abspath(root)))


def predictions(adapter: Adapter, images: Files, *, batch_size: int = 64) -> Iterator[Prediction]:
    """Adapt to images in batches, and yield the predictions of each batch."""
    require_whole(1, batch_size=batch_size)
    names = class_names(adapter.model)
    for some in np.array_split(np.arange(len(images.labels)), np.arange(batch_size, len(images.labels), batch_size)):
        probabilities, labels = adapter(images.load(some)).softmax(-1).max(-1)
        for index, label, probability in zip(some.tolist(), labels.tolist(), probabilities.tolist()):
            name = names[label] if label < len(names) else ""
            yield Prediction(os.path.relpath(images.path(index), images.root), label, name, probability)


def write_predictions(path: str | os.PathLike[str], rows: Sequence[Prediction]) -> None:
    """Write predictions to a CSV file, with a header."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(Prediction._fields)
    table.writerows((*row[:-1], f"{row.probability:.6f}") for row in rows)
    write_whole(Path(path), text.getvalue().encode("utf-8", "surrogateescape"))
