"""Regenerate a folder of images by a diffusion model as DDA does, and read the generated images again.

The generated images have the same tree of folders as the source:

    TARGET/<path in the source>.png

`TARGET/generated.json` has the settings. Files are written atomically, and existing files are not made again, so an
interrupted run is continued by a repetition of the call.
"""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from ... import __version__
from ...core.digests import digest_json
from ...core.files import write_whole
from ...core.statefile import digest
from ...data.corruptions import Integers, Pixels
from ...data.disk import Files
from ...data.domains import Domain, Subset
from ...data.folder import FolderReport, find_copyable_images, identify_images, read_image, require_same_settings
from ...data.imagefile import AnyPath, central_part
from ...errors import ConfigError, InputError, UnreadableError, printable, require_whole
from .denoisers import open_denoiser
from .process import regenerated, resized

PROTOCOL = "generated.json"


def generate_folder(
    source: AnyPath,
    target: AnyPath,
    denoiser: str | os.PathLike[str] | None,
    *,
    steps: int = 100,
    start: int = 50,
    factor: int = 4,
    scale: float = 6.0,
    seed: int = 0,
    batch_size: int = 4,
    skip_unreadable: bool = False,
    device: str | torch.device = "cpu",
    console: Console | None = None,
) -> FolderReport:
    """Write, for every image below a folder, the generated image that DDA classifies beside it.

    The shorter side of an image is resized to the size of the denoiser, and the central square is cut out and has this size
    in the output. (Of the 224 x 224 pixels of ImageNet-C nothing is lost, and 256 x 256 are written.) The noise of an image
    depends on its position in the sorted list of all images, and not on the batch.

    Args:
        source: A folder of images, with or without sub-folders.
        target: The folder to write. It is either new, or was made with the same settings from the same list of images.
        denoiser: The diffusion model, as for the method `dda`.
        steps: Number of steps of the schedule, as for the method `dda`.
        start: Number of steps of noise, as for the method `dda`.
        factor: Factor of the low-pass filter, as for the method `dda`.
        scale: Strength of the guidance, as for the method `dda`.
        seed: Seed of the noise.
        batch_size: Number of images at a time. It affects only time and memory.
        skip_unreadable: Whether to skip images that cannot be decoded, instead of raising an error.
        device: The device that computes.
        console: The console that shows progress if it is a terminal.
    """
    from .method import DDA

    DDA(steps=steps, start=start, factor=factor, scale=scale)  # raises an error for invalid options
    require_whole(1, batch_size=batch_size)
    require_whole(0, seed=seed)
    source, target = Path(source), Path(target)
    net = open_denoiser(denoiser)
    if net.channels not in (None, 3):
        raise ConfigError(f"The denoiser's images have {net.channels} channels: for image files it needs 3.")
    weights = digest(net.state_dict(), "")[:16] if isinstance(net, nn.Module) else ""
    images = find_copyable_images(source, target)
    how: dict[str, Any] = dict(steps=steps, start=start, factor=factor, scale=scale)
    about = {"acclimate": __version__, "denoiser": Path(str(denoiser)).name, "weights": weights, "seed": seed}
    settings = {**about, **how, **identify_images(images)}
    require_same_settings(target / PROTOCOL, settings)
    write_whole(target / PROTOCOL, json.dumps(settings, indent=1).encode())

    rng = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (len(images),), generator=rng).tolist()
    files = [target / Path(image).with_suffix(".png") for image in images]
    missing = [i for i, file in enumerate(files) if not file.exists()]
    report = FolderReport(existing=len(files) - len(missing))
    if isinstance(net, nn.Module):
        net.to(device)
    quiet = console is None or not console.is_terminal
    with Progress(console=console, disable=quiet, transient=True) as progress:
        task = progress.add_task("generating", total=len(missing))
        for at in range(0, len(missing), batch_size):
            group: dict[int, Tensor] = {}
            for i in missing[at : at + batch_size]:
                try:
                    group[i] = _square(read_image(source / images[i]), net.size)
                except UnreadableError as error:
                    if not skip_unreadable:
                        raise UnreadableError(f"{error}. Remove it, or leave it out (--skip-unreadable).") from error
                    report.unreadable.append(images[i])
            # If the denoiser has a fixed size, there is only one shape.
            for shape in dict.fromkeys(image.shape for image in group.values()):
                alike = [i for i, image in group.items() if image.shape == shape]
                batch = torch.stack([group[i] for i in alike]).to(device)
                made = regenerated(net, batch, [seeds[i] for i in alike], **how)
                for i, image in zip(alike, made.cpu()):
                    write_whole(files[i], _png(image))
                    report.written += 1
            progress.advance(task, min(batch_size, len(missing) - at))
    return report


class PairedDomain(Domain):
    """A domain of images, each together with its generated image: (batch, 2, channels, height, width).

    Args:
        domain: The images: files, or a subset of them.
        folder: The folder that `generate_folder` wrote for these files, or for a folder above them.
    """

    def __init__(self, domain: Domain, folder: AnyPath) -> None:
        self.key, self.labels, self.preprocess = domain.key, domain.labels, domain.preprocess
        self._domain, self._generated = domain, _generated(domain, Path(folder))

    @cached_property
    def identity(self) -> str:
        """The digest of the identities of the images and of the generated images."""
        return digest_json([self._domain.identity, self._generated.identity])

    def load(self, indices: Integers) -> Tensor:
        """Return images together with their generated images."""
        return torch.stack([self._domain.load(indices), self._generated.load(indices)], dim=1)

    def __repr__(self) -> str:
        return f"PairedDomain({self._domain!r}, {self._generated!r})"


def _generated(domain: Domain, folder: Path) -> Domain:
    """Return the generated images of a domain, in the same order and with the same crop."""
    if isinstance(domain, Subset):
        return Subset(_generated(domain.domain, folder), domain.chosen)
    if not isinstance(domain, Files) or domain.corruption is not None:
        raise ConfigError(
            f"{domain!r} has no generated images in {folder}, because it is not a folder of image files: write it as "
            "one first, a corruption with `acclimate corrupt`, and then `acclimate dda`."
        )
    originals = [Path(domain.path(i)).absolute().with_suffix(".png") for i in range(len(domain.labels))]
    first = originals[0].parts
    # the tree may start at any folder above the images: the longest path that exists is used
    tails = (n for n in range(len(first) - 1, 0, -1) if folder.joinpath(*first[-n:]).is_file())
    depth = len(first) - next(tails, 0)
    paths = [str(Path(*image.parts[depth:])) for image in originals] if depth < len(first) else []
    missing = [path for path in paths if not (folder / path).is_file()]
    if missing or not paths:
        what = f"{len(missing)} of {len(paths)} images ({missing[0]})" if missing else f"what was made of {originals[0]}"
        raise InputError(f"{printable(folder)} lacks {printable(what)}: `acclimate dda` makes what is missing.")
    how = domain.preprocess  # images that were stored at the size of the model were enlarged to the size of the denoiser
    how = how if how.resize is not None or how.crop is None else replace(how, resize=(how.crop, how.crop))
    return Files(folder, paths, domain.labels, how, name=domain.key.name, severity=domain.key.severity)


def _square(pixels: Pixels, size: int | None) -> Tensor:
    """Return the central square of an image at the size of the denoiser, with pixels from -1 to 1."""
    if size is not None:
        left, top, right, bottom = central_part(pixels.shape[1], pixels.shape[0])
        pixels = pixels[top:bottom, left:right]
    image = torch.tensor(pixels).permute(2, 0, 1) / 127.5 - 1
    if size is None:
        return image
    height, width = (max(size, round(side * size / min(image.shape[1:]))) for side in image.shape[1:])
    top, left = round((height - size) / 2), round((width - size) / 2)
    whole = resized(image[None], (height, width))[0].clamp(-1, 1)
    return whole[:, top : top + size, left : left + size]


def _png(image: Tensor) -> bytes:
    """Return an image with pixels from -1 to 1 as the bytes of a PNG file."""
    pixels = ((image.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()
