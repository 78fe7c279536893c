"""Domains on disk: image files, and arrays as in CIFAR-10-C."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from ..core.digests import digest_bytes, digest_json
from ..errors import InputError, UnreadableError, printable
from .corruptions import Corruption, Integers, Pixels
from .domains import CLEAN, Domain, DomainKey, describe_preparation
from .imagefile import AnyPath, at_8_bits, file_stamp, open_image
from .preprocess import Preprocess


class Files(Domain):
    """A domain of images that are files below one folder, clean or corrupted on the fly.

    The files are read as torchvision's `ImageFolder` reads them: they are converted to RGB, and the orientation that a
    camera stored is ignored. Only grey images of 16 bits are read at all levels, of which most would be white. A corruption
    is applied after resizing and cropping, as in ImageNet-C. The random numbers of an image depend on the position of its
    path in the sorted list of all paths. A file that was replaced since its `identity` was computed is refused.

    Args:
        root: The folder.
        paths: The paths of the files, relative to the folder.
        labels: The label of each file.
        preprocess: The preprocessing of each image.
        name: The name of the domain, if no corruption is made on the fly.
        severity: The severity of the corruption that the files show, if any.
        corruption: A corruption to be made on the fly.
    """

    def __init__(
        self,
        root: AnyPath,
        paths: Sequence[str],
        labels: Sequence[int] | Integers,
        preprocess: Preprocess,
        *,
        name: str = CLEAN,
        severity: int | None = None,
        corruption: Corruption | None = None,
    ) -> None:
        if len(paths) != len(labels):
            raise InputError(f"{len(paths)} images have {len(labels)} labels: give one label for each.")
        if not len(paths):
            raise InputError(f"{root}: there are no images.")
        self.key = DomainKey(corruption.name, corruption.severity) if corruption else DomainKey(name, severity)
        self.labels: Integers = np.asarray(labels, np.int64)
        self.root, self.corruption = os.fspath(root), corruption
        self.preprocess: Preprocess = preprocess
        # one array instead of a list of strings: it is sent quickly to other processes, and shared with forked ones
        self._paths: npt.NDArray[np.bytes_] = np.array([os.fsencode(path) for path in paths])
        self._stamps: Integers | None = None  # of the files, when the identity was computed
        self._indices: Integers = np.unique(self._paths, return_inverse=True)[1].astype(np.int64)

    def path(self, index: int) -> str:
        """Return the path of an image."""
        return os.path.join(self.root, os.fsdecode(self._paths[index]))

    def load(self, indices: Integers) -> Tensor:
        """Return the images of these indices, normalised, (batch, channels, height, width)."""
        images = [self._image(int(index)) for index in indices]
        if len({image.shape for image in images}) > 1:
            raise InputError(f"{self.key}: its images have several sizes, which fit in no batch: give a crop.")
        pixels = np.stack(images)
        if self.corruption is not None:
            pixels = self.corruption(pixels, self._indices[indices])
        return self.preprocess.normalised(pixels)

    def _image(self, index: int) -> Pixels:
        path, stamps = self.path(index), self._stamps
        try:
            return self.preprocess(read_rgb(path, None if stamps is None else tuple(stamps[index].tolist())))
        except UnreadableError as error:
            raise UnreadableError(f"{error}: mend or remove it; `acclimate data check --open-images` names all.") from error
        except InputError as error:
            raise InputError(f"{printable(path)}: {error}.") from None

    @cached_property
    def identity(self) -> str:
        """Return a digest of the paths, labels and sizes of the files.

        Their content is not read, because 50 000 files would take minutes.
        """
        try:
            stamps = [file_stamp(os.stat(self.path(index))) for index in range(len(self.labels))]
        except OSError as error:
            raise InputError(f"{printable(error.filename)} cannot be read ({error.strerror}).") from None
        self._stamps = np.array(stamps, np.int64)
        rows = zip(self._paths.tolist(), self.labels.tolist(), self._stamps[:, 0].tolist())
        return digest_json([digest_bytes(*(b"%b\0%d\0%d\n" % row for row in rows)), self.key, *describe_preparation(self)])

    def __repr__(self) -> str:
        return f"Files({self.key}, {len(self.labels)} images in {self.root})"


class Arrays(Domain):
    """A domain of images that are rows of an array on disk (`.npy`, uint8, (N, height, width, 3)).

    Only the rows of the domain are read.

    Args:
        file: The array.
        labels: The labels of the rows of the domain.
        preprocess: The preprocessing of each image.
        name: The name of the domain.
        severity: The severity of the corruption that the images show, if any.
        start: The first row of the domain.
    """

    def __init__(
        self,
        file: AnyPath,
        labels: Sequence[int] | Integers,
        preprocess: Preprocess,
        *,
        name: str,
        severity: int | None = None,
        start: int = 0,
    ) -> None:
        self.key, self.start = DomainKey(name, severity), start
        self.labels: Integers = np.asarray(labels, np.int64)
        self.file = os.fspath(file)
        self.preprocess: Preprocess = preprocess
        if not 0 < start + len(self.labels) <= len(self._array):
            raise InputError(f"{file} has {len(self._array)} images: too few for {len(self.labels)} from {start} on.")

    @cached_property
    def _array(self) -> Pixels:
        return open_array(self.file)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_array"}  # it would be sent as a whole

    def load(self, indices: Integers) -> Tensor:
        """Return the images of these indices, normalised, (batch, channels, height, width)."""
        pixels = np.array(self._array[self.start + indices])
        if self.preprocess.resize or self.preprocess.crop:
            pixels = np.stack([self.preprocess(Image.fromarray(image)) for image in pixels])
        return self.preprocess.normalised(pixels)

    @cached_property
    def identity(self) -> str:
        """Return a digest of all labels, and of some of the images."""
        some = np.linspace(self.start, self.start + len(self.labels) - 1, 32).astype(int)
        shown = digest_bytes(self._array[some].tobytes(), self.labels.astype("<i8").tobytes())
        return digest_json([shown, self.key, *describe_preparation(self)])

    def __repr__(self) -> str:
        return f"Arrays({self.key}, {len(self.labels)} images in {self.file})"


def read_rgb(path: AnyPath, stamp: tuple[int, int] | None = None) -> Image.Image:
    """Read an image file as torchvision's `ImageFolder` does. If a stamp is given, the file must still have it."""
    with open_image(path, stamp) as file:
        return at_8_bits(file).convert("RGB")


def open_array(file: AnyPath) -> Pixels:
    """Return the images of a `.npy` file, mapped into memory."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{os.fspath(file)} cannot be read as a numpy array ({error}).") from None
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
        raise InputError(f"{os.fspath(file)} is {array.dtype} {array.shape}: expected uint8 (images, height, width, 3).")
    return array
