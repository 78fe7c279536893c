"""Domains on disk: picture files, and the arrays in which CIFAR-10-C comes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor, nn

from ..errors import ConfigError, InputError, UnreadableError, require_whole
from ..models.families import view
from .corruptions import Corruption, Integers, Pixels
from .datasets import normalised, title
from .folder import AnyPath


@dataclass(frozen=True)
class Preprocess:
    """From a picture to what a model takes: resized, its centre cut out, normalised. The numbers are torchvision's.

    Args:
        resize: Length of the shorter side, or (height, width), which may change the aspect ratio. None keeps the size.
        crop: Side of the central square that is cut out. None keeps all.
        mean: The model's normalisation, of pixels from 0 to 1, for red, green and blue; so `std`.
        std: See `mean`.
    """

    resize: int | tuple[int, int] | None
    crop: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # a list is as good
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ConfigError(f"mean={self.mean}, std={self.std}: give three numbers each, and a deviation above 0.")
        if isinstance(self.resize, tuple) and len(self.resize) != 2:
            raise ConfigError(f"resize={self.resize}: give the shorter side, or (height, width).")
        resize = self.resize if isinstance(self.resize, tuple) else (self.resize,)
        for name, side in (*(("resize", side) for side in resize), ("crop", self.crop)):
            if side is not None:
                require_whole(1, **{name: side})

    @classmethod
    def for_model(
        cls, model: nn.Module, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> Preprocess:
        """For photographs of any size: see `Input.photographs`; for the arguments `input_of`."""
        return input_of(model, mean=mean, std=std).photographs()

    def __call__(self, image: Image.Image) -> Pixels:
        """An RGB picture as uint8 (height, width, 3), ready for a corruption or `normalised`."""
        if self.resize is not None:
            width, height = image.size
            if isinstance(self.resize, tuple):
                height, width = self.resize
            elif width <= height:
                width, height = self.resize, int(self.resize * height / width)
            else:
                width, height = int(self.resize * width / height), self.resize
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        if self.crop is not None:
            width, height = image.size
            if self.crop > min(width, height):  # torchvision would add a black frame
                raise InputError(f"it has {width} x {height} pixels, too few to cut out {self.crop} x {self.crop}")
            left, top = round((width - self.crop) / 2), round((height - self.crop) / 2)
            image = image.crop((left, top, left + self.crop, top + self.crop))
        return np.asarray(image)


class Input(NamedTuple):
    """What a model takes: squares of `size` pixels, normalised; and how many `classes` its head has."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    share: float  # of the resized picture's shorter side that is cut out: timm's crop_pct
    classes: int

    def photographs(self) -> Preprocess:
        """Pictures of any size. At 224 pixels shorter side 256, as in the papers; else by the model's own `crop_pct`."""
        return Preprocess(256 if self.size == 224 else int(self.size / self.share), self.size, self.mean, self.std)

    def stored(self, side: int) -> Preprocess:
        """Squares that are stored at `side` pixels, as they are; for a model of another size resized, nothing cut off."""
        return Preprocess(None if self.size == side else self.size, self.size, self.mean, self.std)

    def squashed(self) -> Preprocess:
        """The whole picture as a square, of which 7/8 are kept: from 256 x 256 at 224 pixels."""
        side = self.size * 256 // 224
        return Preprocess((side, side), self.size, self.mean, self.std)


def input_of(model: nn.Module, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> Input:
    """What a model takes, by its own configuration. Nothing is assumed where that does not say it.

    Args:
        model: A vision transformer that acclimate understands.
        mean: Normalisation instead of that in a timm model's configuration; any other model needs it. So `std`.
        std: See `mean`.
    """
    from timm.data import resolve_model_data_config

    vit = view(model)
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    if (mean is None) != (std is None):
        raise ConfigError(f"mean={mean}, std={std}: give both, or neither.")
    if mean is None or std is None:
        if not (config.get("mean") and config.get("std")):  # timm would fill in ImageNet's
            raise ConfigError(
                f"This {type(model).__name__} does not say how its pictures are normalised: give mean= and std=. They stand "
                "in a transformers model's image processor (image_mean, image_std), in torchvision's weights.transforms() "
                "(mean, std), and in pretrained_cfg for a model that timm.create_model made."
            )
        resolved = resolve_model_data_config(model)
        mean, std = resolved["mean"], resolved["std"]
    # not the configuration's input size, which stays the same in create_model(..., img_size=...)
    height, width = vit.image_size or config.get("input_size", (3, 0, 0))[1:]
    if height != width or not height:
        raise ConfigError(
            f"This {type(model).__name__} takes no squares of one size ({height} x {width}): give a Preprocess instead."
        )
    return Input(height, tuple(mean), tuple(std), config.get("crop_pct") or 0.875, vit.classes)


class Files:
    """Pictures that are files below one folder, clean or under a corruption made on the fly.

    They are read as torchvision's `ImageFolder` reads them: converted to RGB, a camera's note of its orientation ignored. A
    corruption comes after resizing and cropping, as ImageNet-C was made, and a picture's random numbers depend on the place
    of its path in the sorted list of all.

    Args:
        root: The folder.
        paths: The files, by their paths from it.
        labels: Of each file.
        preprocess: What is done to each picture.
        name: Of the domain; that of the corruption if there is one.
        severity: Of the corruption that the files show, if any.
        corruption: Made on the fly.
    """

    def __init__(
        self,
        root: AnyPath,
        paths: Sequence[str],
        labels: Sequence[int] | Integers,
        preprocess: Preprocess,
        *,
        name: str = "clean",
        severity: int | None = None,
        corruption: Corruption | None = None,
    ) -> None:
        if len(paths) != len(labels):
            raise InputError(f"{len(paths)} pictures have {len(labels)} labels: give one label for each.")
        if not len(paths):
            raise InputError(f"{root}: there are no pictures.")
        self.name, self.severity = (corruption.name, corruption.severity) if corruption else (name, severity)
        self.labels: Integers = np.asarray(labels, np.int64)
        self.root, self.preprocess, self.corruption = os.fspath(root), preprocess, corruption
        # one array, not a list of strings: quick to send to another process, and shared with those that are forked
        self._paths: npt.NDArray[np.bytes_] = np.array([os.fsencode(path) for path in paths])
        self._numbers: Integers = np.unique(self._paths, return_inverse=True)[1].astype(np.int64)

    def path(self, index: int) -> str:
        """Where a picture is."""
        return os.path.join(self.root, os.fsdecode(self._paths[index]))

    def load(self, indices: Integers) -> Tensor:
        pictures = [self._picture(self.path(index)) for index in indices]
        if len({picture.shape for picture in pictures}) > 1:
            raise InputError(f"{title(self)}: its pictures have several sizes, which fit in no batch: give a crop.")
        pixels = np.stack(pictures)
        if self.corruption is not None:
            pixels = self.corruption(pixels, self._numbers[indices])
        return normalised(pixels, self.preprocess.mean, self.preprocess.std)

    def _picture(self, path: str) -> Pixels:
        try:
            return self.preprocess(read_rgb(path))
        except UnreadableError:
            raise
        except InputError as error:
            raise InputError(f"{path}: {error}.") from None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Lists and sizes of the files stand for their content: reading 50 000 of them would take minutes."""
        try:
            sizes = [os.stat(self.path(index)).st_size for index in range(len(self.labels))]
        except OSError as error:
            raise InputError(f"{error.filename} cannot be read ({error.strerror}).") from None
        rows = zip(self._paths.tolist(), self.labels.tolist(), sizes)
        return {
            "files": _digest(b"".join(b"%b\0%d\0%d\n" % row for row in rows)),
            "count": len(self.labels),
            "name": self.name,
            "severity": self.severity,
            "corruption": self.corruption and self.corruption.identity,
            "preprocess": _plain(self.preprocess),
        }

    def __repr__(self) -> str:
        return f"Files({title(self)}, {len(self.labels)} pictures in {self.root})"


class Arrays:
    """Pictures that are rows of an array on disk (`.npy`, uint8, (N, height, width, 3)), of which only these are ever read.

    Args:
        file: The array.
        labels: Of the rows that are the domain.
        preprocess: What is done to each picture.
        name: Of the domain.
        severity: Of the corruption that the pictures show, if any.
        start: The first row.
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
        self.name, self.severity, self.start = name, severity, start
        self.labels: Integers = np.asarray(labels, np.int64)
        self.file, self.preprocess = os.fspath(file), preprocess
        if not 0 < start + len(self.labels) <= len(self._array):
            raise InputError(f"{file} has {len(self._array)} pictures: too few for {len(self.labels)} from {start} on.")

    @cached_property
    def _array(self) -> Pixels:
        return open_array(self.file)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_array"}  # it would be sent whole

    def load(self, indices: Integers) -> Tensor:
        pixels = np.array(self._array[self.start + indices])
        if self.preprocess.resize or self.preprocess.crop:
            pixels = np.stack([self.preprocess(Image.fromarray(picture)) for picture in pixels])
        return normalised(pixels, self.preprocess.mean, self.preprocess.std)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All labels, and some pictures for the rest of them."""
        some = np.linspace(self.start, self.start + len(self.labels) - 1, 32).astype(int)
        return {
            "array": _digest(self._array[some].tobytes() + self.labels.astype("<i8").tobytes()),
            "count": len(self.labels),
            "name": self.name,
            "severity": self.severity,
            "preprocess": _plain(self.preprocess),
        }

    def __repr__(self) -> str:
        return f"Arrays({title(self)}, {len(self.labels)} pictures in {self.file})"


def read_rgb(path: AnyPath) -> Image.Image:
    """A picture file as torchvision's `ImageFolder` reads it."""
    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        raise UnreadableError(f"{os.fspath(path)} cannot be read as a picture ({error}).") from error


def open_array(file: AnyPath) -> Pixels:
    """Pictures in a `.npy` file, mapped into memory."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{os.fspath(file)} cannot be read as a numpy array ({error}).") from None
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
        raise InputError(f"{os.fspath(file)} is {array.dtype} {array.shape}: expected uint8 (pictures, height, width, 3).")
    return array


def _plain(preprocess: Preprocess) -> dict[str, Any]:
    """As it comes back from JSON."""
    values = asdict(preprocess)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
