"""Image files: how they are found below a folder and opened, whatever else the folder contains.

| in a folder | what happens |
|---|---|
| a file with the name of an image | it is an image, and must be one of `FORMATS`; no other decoder of Pillow is tried |
| a pipe, device, socket, folder or broken link with such a name | it is named, and never opened |
| a link to a folder that is read already, or to one above it | it is named, and not followed |
| an image of more pixels than `PIL.Image.MAX_IMAGE_PIXELS` | it is refused before it is decoded |
"""

from __future__ import annotations

import io
import math
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import UnreadableError, printable, shorten_list

AnyPath = str | os.PathLike[str]
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # of others, Pillow gives some to external programs
LONGEST = 16  # largest ratio of the sides of an image that is resized before its central square is cropped


def has_image_name(name: str) -> bool:
    """Return whether a name is that of an image. Hidden files are no images."""
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


@dataclass
class Found:
    """The result of a search for images. Paths begin at the top of the search."""

    images: dict[str, list[str]]  # of each folder that was searched
    no_files: list[str] = field(default_factory=list)  # entries with the name of an image that are no files
    repeated: list[str] = field(default_factory=list)  # links to folders that are read already, which are not followed
    closed: list[str] = field(default_factory=list)  # folders that cannot be read, each with the reason

    def problems(self) -> list[str]:
        """Return what was left out, in words."""
        about = {
            "entries with names of images are no files": self.no_files,
            "links lead to folders that are read already": self.repeated,
            "folders cannot be read": self.closed,
        }
        return [f"{len(paths)} {what} ({shorten_list(sorted(paths))})" for what, paths in about.items() if paths]


def search(top: AnyPath, folders: Sequence[str]) -> Found:
    """Find the images in some folders and below them. Links are followed, but no folder is read twice.

    A folder is read where it lies, and through a link only if it lies elsewhere. So no image belongs to two of the folders.
    The images of a folder are in the order of their names, and come before those of its sub-folders.

    Args:
        top: The folder from which all paths begin.
        folders: The folders to search, by their names below the top; "" is the top itself. Names of no folders are left out.
    """
    found, seen = Found({folder: [] for folder in folders}), set[object]()
    if "" not in folders:
        seen.add(_identity(os.fspath(top)))
    start = [(folder, folder) for folder in folders if os.path.isdir(os.path.join(top, folder))]
    links = deque(pair for pair in start if os.path.islink(os.path.join(top, pair[0])))
    waiting = [pair for pair in start if pair not in links]
    while waiting or links:
        folder, here = waiting.pop() if waiting else links.popleft()
        where = os.path.join(top, here)
        if _identity(where) in seen:
            found.repeated.append(here)
            continue
        seen.add(_identity(where))
        try:
            with os.scandir(where) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            found.closed.append(f"{here or where}: {error.strerror}")
            continue
        for entry in listed:
            path = f"{here}/{entry.name}" if here else entry.name
            if has_image_name(entry.name):
                (found.images[folder] if _holds(entry.is_file) else found.no_files).append(path)
            elif is_folder(entry):
                (links if entry.is_symlink() else waiting).append((folder, path))
    for images in found.images.values():
        images.sort(key=_place)
    return found


def _place(path: str) -> list[tuple[bool, str]]:
    """Return a key that sorts paths by folders, and the files of a folder before its sub-folders."""
    *folders, file = path.split("/")
    return [*((True, folder) for folder in folders), (False, file)]


def _identity(folder: str) -> object:
    """Return what is the same for a folder by whichever links it is reached. If it cannot be read, that is its path."""
    try:
        about = os.stat(folder)
    except OSError:
        return folder
    return about.st_dev, about.st_ino


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry of a folder is a folder itself, or a link to one."""
    return _holds(entry.is_dir)


def _holds(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:  # for example of a link to itself
        return False


def file_stamp(about: os.stat_result) -> tuple[int, int]:
    """Return the size of a file and the time of its last change. They change if the file is replaced."""
    return about.st_size, about.st_mtime_ns % 2**62  # fits into an int64, in any century


@contextmanager
def open_image(path: AnyPath, stamp: tuple[int, int] | None = None) -> Iterator[Image.Image]:
    """Open an image file for the block, in which it is decoded.

    Args:
        path: The file. Nothing but a file is opened: to open a pipe would wait for its writer.
        stamp: The stamp that the file must still have.

    Raises:
        UnreadableError: If the file cannot be read, in the block too.
    """
    try:
        _require_file(os.stat(path))
        with open(path, "rb", opener=_at_once) as file:
            about = os.fstat(file.fileno())
            _require_file(about)
            if stamp not in (None, file_stamp(about)):
                raise ValueError("it has changed since it was listed")
            with Image.open(file, formats=FORMATS) as image:
                _require_usable(image)
                yield image
    except UnreadableError:
        raise
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        raise UnreadableError(f"{printable(path)} cannot be read as an image ({_reason(error)})") from error


def decode_image(content: bytes) -> Image.Image:
    """Return the RGB image in the content of a file, upright if its EXIF data says how it was taken.

    Raises:
        UnreadableError: If it cannot be decoded, or has too many pixels.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _require_usable(image)
            return at_8_bits(ImageOps.exif_transpose(image)).convert("RGB")
    except Exception as error:  # as above
        raise UnreadableError(f"the image cannot be read ({_reason(error)})") from error


def count_pixels(content: bytes) -> int:
    """Return the number of pixels of the image in the content of a file, which is not decoded.

    Raises:
        UnreadableError: If it is no image.
    """
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            return image.width * image.height
    except Exception as error:  # as above
        raise UnreadableError(f"the image cannot be read ({_reason(error)})") from error


def _require_usable(image: Image.Image) -> None:
    if image.width * image.height > most_pixels():
        raise ValueError(f"it has {image.width} x {image.height} pixels, more than {most_pixels():.0f}")
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        raise ValueError("its pixels are 32-bit numbers of an unknown range")


def _require_file(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is no file" if not stat.S_ISDIR(about.st_mode) else "it is a folder")
    if not about.st_size:
        raise ValueError("it is empty")


def _at_once(path: str, flags: int) -> int:
    """Open a file, without waiting if a pipe has taken its place meanwhile."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _reason(error: Exception) -> str:
    """Return the reason of an error in one line, without the path of the file."""
    if isinstance(error, UnidentifiedImageError):
        return f"it is none of {', '.join(FORMATS)}"
    return printable(getattr(error, "strerror", None) or error) or type(error).__name__


def most_pixels() -> float:
    """Return the largest number of pixels of an image: Pillow's limit, which `PIL.Image.MAX_IMAGE_PIXELS` changes."""
    return math.inf if Image.MAX_IMAGE_PIXELS is None else Image.MAX_IMAGE_PIXELS


def at_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits at 8 bits, and any other image as it is."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image) // 257).astype(np.uint8))  # Pillow would make all levels above 255 white


def central_part(width: int, height: int) -> tuple[int, int, int, int]:
    """Return the box (left, top, right, bottom) of an image whose central square is to be resized and cropped.

    It is the whole image, or the central part of one that is longer than `LONGEST` times its width: resized to a shorter
    side of 256 pixels, an image of 60000 x 1 would need 15 GiB.
    """
    most = LONGEST * min(width, height)
    left, top = (max(0, side - most) // 2 for side in (width, height))
    return left, top, width - left, height - top


def trimmed(image: Image.Image) -> Image.Image:
    """Return the central part of an image that is very long, and any other image as it is."""
    box = central_part(*image.size)
    return image if box == (0, 0, *image.size) else image.crop(box)
