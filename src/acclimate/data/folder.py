"""Corrupted copies of a folder of images, written as a tree of files like that of ImageNet-C.

    TARGET/<corruption>/<severity>/<class folder>/<file>.JPEG

`TARGET/corruptions.json` describes how the tree was made. Files are written atomically, and existing files are not written
again. Repeating an interrupted command therefore continues it.
"""

from __future__ import annotations

import io
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import Progress

from .. import __version__
from ..core.digests import digest_bytes
from ..core.files import file_digest, write_whole
from ..errors import ConfigError, InputError, StateError, UnreadableError, printable, require_between, shorten_list
from ._frost import photographs
from .corruptions import LONGEST_SIDE, Pixels, constants_for, corrupt, require_valid
from .imagefile import SUFFIXES, AnyPath, at_8_bits, open_image, search, trimmed

PROTOCOL = "corruptions.json"
IMAGENET_C = (256, 224)  # resize and crop of ImageNet-C's images
T = TypeVar("T")


@dataclass
class FolderReport:
    """The numbers of files that were written, existed already, or were skipped."""

    written: int = 0
    existing: int = 0
    unreadable: list[str] = field(default_factory=list)  # skipped
    constants: Counter[str] = field(default_factory=Counter)  # number of files written with the constants of each name

    def __str__(self) -> str:
        used = ", ".join(f"{count} with the constants of {name}" for name, count in sorted(self.constants.items()))
        parts = [f"{self.written} files written" + (f" ({used})" if used else "")]
        if self.existing:
            parts.append(f"{self.existing} were there already")
        if self.unreadable:
            parts.append(f"{len(self.unreadable)} unreadable images skipped: {shorten_list(self.unreadable)}")
        return "; ".join(parts) + "."


def corrupt_folder(
    source: AnyPath,
    target: AnyPath,
    names: Sequence[str],
    severities: Sequence[int],
    *,
    seed: int = 0,
    resize_crop: tuple[int, int] | None = None,
    constants: str | None = None,
    frost: AnyPath | None = None,
    quality: int = 85,
    skip_unreadable: bool = False,
    workers: int | None = None,
    console: Console | None = None,
) -> FolderReport:
    """Write corrupted copies of every image below a folder.

    All images become 8-bit RGB: grey and palette images are converted, transparent parts become white, and a rotation that a
    camera stored is applied. The random numbers of an image depend on its position in the sorted list of all images.

    Args:
        source: A folder of images, which may be in sub-folders (one per class). The tree of sub-folders is kept.
        target: The folder to write to. It must be new, or made with the same settings from the same list of images.
        names: The corruptions.
        severities: The severities of each corruption, from 1 to 5.
        seed: The seed of all random numbers.
        resize_crop: The length of the shorter side after resizing, and the side of the central square that is then cropped,
            before the corruption. `IMAGENET_C` has the values of ImageNet-C. Default: every image keeps its size.
        constants: The strengths of the severities: "imagenet-c" or "cifar-10-c". Default: chosen by the size of each image.
        frost: A folder with the photographs of ice that ImageNet-C used (frost1.png, ...). Default: generated ice.
        quality: The quality of the JPEG files. ImageNet-C has 85.
        skip_unreadable: Whether to leave out files that cannot be decoded. Otherwise nothing is written if there is such a
            file.
        workers: The number of threads, which does not change the result. Default: one per processor.
        console: A console, which shows progress if it is a terminal.
    """
    source, target = Path(source), Path(target)
    wanted = [(name, severity) for name in names for severity in severities]
    if not wanted:
        raise ConfigError("no corruption or no severity is given: name at least one of each.")
    for name, severity in wanted:
        require_valid(name, severity, seed, constants)
    require_between(1, 100, quality=quality)
    require_between(1, math.inf, workers=workers, optional=True)
    images = find_copyable_images(source, target)
    settings = _settings(images, seed, resize_crop, constants, frost, quality)
    require_same_settings(target / PROTOCOL, settings)

    jobs = [_Job(index, image, wanted, target) for index, image in enumerate(images)]
    report = FolderReport(existing=sum(len(wanted) - len(job.missing) for job in jobs))
    jobs = [job for job in jobs if job.missing]
    stop = threading.Event()

    def read(job: _Job) -> Pixels:
        pixels = read_image(source / job.image, resize_crop)
        height, width, _ = pixels.shape
        if max(height, width) > LONGEST_SIDE:
            size = f"{width} x {height} pixels, at most {LONGEST_SIDE} a side"
            raise UnreadableError(f"{printable(source / job.image)} is too large to be corrupted ({size})")
        return pixels

    def problem(job: _Job) -> str | None:
        try:
            if not stop.is_set():
                read(job)
        except UnreadableError as error:
            return str(error)
        return None

    def write(job: _Job) -> tuple[str, int] | None:
        """Return whose constants were used and how many files were written, or None for an unreadable image."""
        try:
            pixels = read(job)
        except UnreadableError:
            if skip_unreadable:
                return None
            raise
        whose = constants or constants_for(*pixels.shape[:2])
        for name, severity in job.missing:
            if stop.is_set():
                break
            shown = corrupt(pixels, name, severity, seed=seed, indices=[job.index], constants=whose, frost=frost)
            encoded = io.BytesIO()
            Image.fromarray(shown).save(encoded, "JPEG", quality=quality, optimize=True)
            write_whole(job.file(name, severity), encoded.getvalue())
        return whose, len(job.missing)

    quiet = console is None or not console.is_terminal
    pool = ThreadPoolExecutor(workers or os.cpu_count())
    try:
        with Progress(console=console, disable=quiet, transient=True) as progress:
            if not skip_unreadable:
                problems = [text for _, text in _in_turn(pool, problem, jobs, progress, "reading") if text is not None]
                if problems:
                    raise UnreadableError(
                        f"{shorten_list(problems, '; ')}. Nothing was written. Remove what cannot be read, or leave it out "
                        "with skip_unreadable=True (on the command line --skip-unreadable)."
                    )
            write_whole(target / PROTOCOL, json.dumps(settings, indent=1).encode())
            for job, done in _in_turn(pool, write, jobs, progress, "writing"):
                if done is None:
                    report.unreadable.append(job.image)
                else:
                    whose, count = done
                    report.written += count
                    report.constants[whose] += count
    finally:  # also after Ctrl-C: threads finish their current file and start no other
        stop.set()
        pool.shutdown(cancel_futures=True)
    return report


class _Job:
    """An image, its index, and the files that are still to be made of it."""

    def __init__(self, index: int, image: str, wanted: list[tuple[str, int]], target: Path) -> None:
        self.index, self.image, self._target = index, image, target
        self.missing = [which for which in wanted if not os.path.exists(self.file(*which))]

    def file(self, name: str, severity: int) -> Path:
        return self._target / name / str(severity) / Path(self.image).with_suffix(".JPEG")


def _in_turn(
    pool: ThreadPoolExecutor, work: Callable[[_Job], T], jobs: list[_Job], progress: Progress, what: str
) -> Iterable[tuple[_Job, T]]:
    """Return every job with its result, in order."""
    return progress.track(zip(jobs, pool.map(work, jobs)), total=len(jobs), description=what)


def read_image(path: AnyPath, resize_crop: tuple[int, int] | None = None) -> Pixels:
    """Read an image file as uint8 RGB (height, width, 3)."""
    with open_image(path) as file:
        return np.asarray(_resized(_rgb(ImageOps.exif_transpose(file)), resize_crop))


def _rgb(image: Image.Image) -> Image.Image:
    image = at_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _resized(image: Image.Image, resize_crop: tuple[int, int] | None) -> Image.Image:
    if resize_crop is None:
        return image
    short, side = resize_crop
    image = trimmed(image)
    factor = short / min(image.size)
    width, height = (max(short, int(length * factor)) for length in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return image.crop((left, top, left + side, top + side))


def find_copyable_images(source: Path, target: Path) -> list[str]:
    """Return all images below `source`, sorted, if copies of them can be written below `target`.

    Two images whose copies would have the same name are refused, and so is a target inside of the source.
    """
    found = find_images(source)
    by_target: dict[str, str] = {}
    for image in found:
        other = by_target.setdefault(str(Path(image).with_suffix("")), image)
        if other != image:
            both = f"{source}: {other} and {image}"
            raise InputError(f"{printable(both)} would be written to one file. Rename one of them.")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{target} lies in {source}: what is written there would be taken for a source next time.")
    return found


def find_images(source: Path) -> list[str]:
    """Return the relative paths of all images below a folder, sorted, and raise an error if there are none."""
    if not source.is_dir():
        raise InputError(
            f"{printable(source)} is not a folder: give one with images in it, or in sub-folders, one per class."
        )
    found = search(source, [""])
    if found.repeated or found.closed:
        raise InputError(f"{printable(source)}: {'; '.join(found.problems())}. Remove or mend these.")
    images = sorted(found.images[""] + found.no_files)  # the latter are named when they are read
    if not images:
        raise InputError(f"{printable(source)} holds no images ({', '.join(sorted(SUFFIXES))}).")
    return images


def _settings(
    images: list[str],
    seed: int,
    resize_crop: tuple[int, int] | None,
    constants: str | None,
    frost: AnyPath | None,
    quality: int,
) -> dict[str, Any]:
    """Return everything that determines the files of a tree."""
    if resize_crop is not None and not 0 < resize_crop[1] <= resize_crop[0]:
        raise ConfigError(f"resize_crop={resize_crop}: give two sizes, of which the second is not larger.")
    ice = {file.name: file_digest(file) for file in photographs(Path(frost)).files} if frost else "procedural"
    return {
        "acclimate": __version__,
        "seed": seed,
        "constants": constants or "by size",
        "frost": ice,
        "resize_crop": list(resize_crop) if resize_crop else None,
        "quality": quality,
        **identify_images(images),
    }


def identify_images(images: list[str]) -> dict[str, Any]:
    """Return the number of images and a digest of their paths, which identify a list of images."""
    # names may contain a line break, but no zero
    lines = [image.replace("\n", "\0") for image in images]
    return {"images": len(images), "images_digest": digest_bytes(os.fsencode("\n".join(lines)))}


def require_same_settings(file: Path, settings: dict[str, Any]) -> None:
    """Refuse to add files to a tree that was made with other settings, or to a folder of other files.

    `file` is the file of settings in the tree.
    """
    target = file.parent
    if not file.exists():
        if target.is_dir() and any(target.iterdir()):
            raise StateError(f"{target} is not empty and has no {file.name}: give a new folder.")
        return
    try:
        before = dict(json.loads(file.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise StateError(f"{file} is damaged ({error}): remove the folder, or give a new one.") from None
    changed = [key for key in settings.keys() | before.keys() if settings.get(key) != before.get(key)]
    if changed:
        was = ", ".join(f"{key} {before.get(key)!r}, now {settings.get(key)!r}" for key in sorted(changed))
        raise StateError(f"{target} was made with other settings ({was}): repeat those, or give a new folder.")
