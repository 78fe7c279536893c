"""Domains of a user's own data: datasets and loaders of torch, and folders that torchvision opens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..core.digests import digest_bytes, digest_json
from ..errors import InputError
from .corruptions import Integers
from .domains import Domain, DomainKey

COMPARED = 64  # images that identify a dataset


class OwnDataset(Domain):
    """A domain of a dataset of torch, whose items begin with an image, as the model takes it, and a label.

    The images have to be the same at every call, so that its transforms must not be random. Labels are columns of the
    model's head. They are read from `targets` if the dataset has them, and otherwise from all items.

    Args:
        dataset: The dataset, such as torchvision's `ImageFolder`.
        name: The name of the domain.
    """

    def __init__(self, dataset: Any, name: str = "own data") -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise InputError(f"{name}: a {type(dataset).__name__} has no order and no length: give a dataset with indices.")
        if not len(dataset):
            raise InputError(f"{name}: there are no images.")
        self.key = DomainKey(name)
        self.dataset = dataset
        given = getattr(dataset, "targets", None)
        if given is None or len(given) != len(dataset):
            given = [self._item(index)[1] for index in range(len(dataset))]
        self.labels: Integers = self._whole(given)

    def _whole(self, labels: Any) -> Integers:
        """Return the labels as an array of whole numbers."""
        try:
            numbers = np.asarray(torch.as_tensor(labels))
        except (TypeError, ValueError, RuntimeError):  # texts, None, or tensors of several numbers
            numbers = np.zeros(0)
        if numbers.shape != (len(labels),) or not np.array_equal(numbers, numbers.astype(np.int64)):
            raise InputError(
                f"{self.key}: its labels begin with {labels[0]!r}: give columns of the model's head, as whole numbers."
            )
        return numbers.astype(np.int64)

    def _item(self, index: int) -> tuple[Tensor, Any]:
        """Return an image and its label."""
        item = self.dataset[index]
        if not isinstance(item, (tuple, list)) or len(item) < 2:
            raise InputError(f"{self.key}: item {index} is no pair of an image and a label.")
        if not isinstance(item[0], Tensor):
            raise InputError(
                f"{self.key}: image {index} is a {type(item[0]).__name__}: give the dataset a transform that makes a tensor "
                "as the model takes it."
            )
        return item[0], item[1]

    def load(self, indices: Integers) -> Tensor:
        """Return the images of these indices, (batch, channels, height, width)."""
        images = [self._item(int(index))[0] for index in indices]
        if len({image.shape for image in images}) > 1:
            raise InputError(
                f"{self.key}: its images have several sizes, which fit in no batch: give a transform that crops."
            )
        return torch.stack(images)

    @cached_property
    def identity(self) -> str:
        """Return a digest of the labels, and of 64 images, which are evenly distributed."""
        chosen = np.linspace(0, len(self.labels) - 1, min(COMPARED, len(self.labels))).astype(np.int64)
        images = digest_bytes(*(image.contiguous().numpy().tobytes() for image in (self._item(int(i))[0] for i in chosen)))
        return digest_json([images, digest_bytes(self.labels.tobytes()), self.key])


def own_domains(data: object) -> list[Domain]:
    """Return the domains of a dataset, of a loader, or of several of them by name. A list of domains is returned as it is.

    Of a loader only the dataset is used: order and size of batches are those of the setting.
    """
    if isinstance(data, Mapping):
        if not data or not all(isinstance(each, (Dataset, DataLoader)) for each in data.values()):
            raise InputError("Several domains are given as a dictionary of datasets or loaders of torch, by name.")
        return [OwnDataset(_dataset(each), str(name)) for name, each in data.items()]
    if isinstance(data, (Dataset, DataLoader)):
        return [OwnDataset(_dataset(data))]
    domains = list(data) if isinstance(data, (list, tuple)) else []
    if not domains or not all(isinstance(each, Domain) for each in domains):
        raise InputError(f"data= is a {type(data).__name__}: give a dataset or loader of torch, or the name of a data set.")
    return domains


def _dataset(data: Any) -> Any:
    return data.dataset if isinstance(data, DataLoader) else data
