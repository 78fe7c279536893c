"""Every table and figure of the DCT paper as an experiment that can be listed, tried small, and run.

Small (`scale="small"`) is the bundled model on a few of the bundled images: it shows that an experiment runs from end to
end, and its numbers mean nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.registry import find_method
from ...data import bundled
from ...data.catalog import Data
from ...data.domains import Corrupted, Images, Subset
from ...data.layouts import OFFICE
from ...errors import ConfigError, suggest
from ...evaluation.bench import bench
from ...evaluation.published import PublishedTable
from ...evaluation.results import Results
from ...evaluation.testbed import opened_statistics
from .protocols import VIT_B, VIT_L
from .reported import figures, tables

SEEDS = (2021, 2022, 2023)
COMPARED = ("source", "t3a", "cotta", "dda", "memo", "adacontrast", "cfa", "tent", "dept-g", "sar", "eata", "dct")
MINUTES = {"source": 2, "tent": 5, "sar": 7, "dct": 8, "memo": 14 * 60, "dda": 5 * 24 * 60}
"""For 50 000 images on an RTX 3090 as the paper has them; source is our guess, and what is not here is taken for 10."""


ANALYSES = {
    "attention-distance": "attention-distance",
    "rollout": "rollout",
    "tokens-by-class": "tsne",
    "tokens-by-domain": "tsne",
    "conditioners": "tsne",
    "conditioners-more": "tsne",
}
"""The paper's drawings, and what `acclimate analyze` calls them."""
SMALL_IMAGES = 96  # of each domain
SMALL_CORRUPTIONS = ("impulse_noise", "glass_blur", "brightness", "elastic_transform")  # one of each group


@dataclass(frozen=True)
class Experiment:
    """Describes one table or figure: what it needs, and the grid that makes it."""

    name: str
    shows: str
    data: str
    images: int  # met by each method, for each seed, at full scale
    grid: Mapping[str, Any] = field(default_factory=dict)  # what `acclimate.bench` is asked for
    model: str = VIT_B
    reported: str | None = None  # its table among the reported ones

    @property
    def methods(self) -> list[str | tuple[str, dict[str, Any]]]:
        """Return the methods, with options where they are not the defaults."""
        return list(self.grid.get("methods", COMPARED))

    @property
    def needing(self) -> list[str]:
        """Return methods that need more than the model and the stream: source statistics, or a diffusion model."""
        return [m for m in self.methods if isinstance(m, str) and (find_method(m).info.needs or m == "dda")]

    def lacking(self, source_statistics: Any, denoiser: str | None) -> list[str]:
        """Return those of them that cannot be run with these."""
        known = {kind for statistics in opened_statistics(source_statistics) for kind in statistics.kinds}
        return [m for m in self.needing if not {*find_method(m).info.needs} <= known or (m == "dda" and denoiser is None)]

    @property
    def hours(self) -> float:
        """Return the rough cost on one RTX 3090, for all methods and seeds."""
        names = [m if isinstance(m, str) else m[0] for m in self.methods]
        minutes = sum(MINUTES.get(name, 10) for name in names) * self.images / 50_000
        return minutes * len(self.grid.get("seeds", SEEDS)) / 60

    def command(self, scale: str = "full") -> str:
        """Return the command that runs it."""
        return f"acclimate paper {self.name} " + ("--scale small" if scale == "small" else f"--root {self.data.upper()}")


def experiments() -> dict[str, Experiment]:
    """Return all experiments, in the paper's order."""
    corrupted = 15 * 50_000

    def imagenet_c(name: str, setting: str, severity: int, shows: str, model: str = VIT_B, **grid: Any) -> Experiment:
        grid = {"settings": setting, "severities": [severity], **grid}
        images = 2 * corrupted if setting == "label-shift" else corrupted
        return Experiment(f"table-{name}", shows, "imagenet-c", images, grid, model, name)

    several = {"settings": ["normal", "label-shift", "bs1"]}
    ablation = ["source", "sar", ("dct", {"generator": False}), "dct"]
    rates: list[Any] = [("dct", {"lr_generator": rate}) for rate in (1e-4, 1e-3, 1e-2, 1e-1)]
    four = ["source", "tent", "sar", "dct"]
    made = [
        imagenet_c("normal", "normal", 5, "ImageNet-C, severity 5, one shuffled stream for each corruption"),
        imagenet_c("label-shift", "label-shift", 5, "ImageNet-C, severity 5, imbalanced label shifts"),
        imagenet_c("bs1", "bs1", 5, "ImageNet-C, severity 5, one image at a time"),
        Experiment("table-imagenet-r", "ImageNet-R in three settings", "imagenet-r", 4 * 30_000,
                   {**several, "methods": ["source", "tent", "sar", ("dct", {"lr_generator": 0.003})]},
                   reported="imagenet-r"),
        Experiment("table-visda-2021", "VisDA-2021 in three settings", "visda-2021", 4 * 17_304, several,
                   reported="visda-2021"),
        Experiment("table-office-home", "Office-Home, 12 pairs of source and target", "office-home", 3 * 15_588, {},
                   reported="office-home"),
        imagenet_c("ablation", "normal", 5, "SAR, conditioners without generator, DCT", methods=ablation),
        Experiment("figure-sensitivity", "DCT over learning rates of its generators", "imagenet-c", corrupted,
                   {"severities": [5], "methods": ["source", *rates]}),
        Experiment("table-cost", "Running time, Gaussian noise", "imagenet-c", 50_000,
                   {"severities": [5], "corruptions": ["gaussian_noise"], "seeds": SEEDS[:1]}),
        imagenet_c("normal-3", "normal", 3, "ImageNet-C, severity 3"),
        imagenet_c("label-shift-3", "label-shift", 3, "ImageNet-C, severity 3, imbalanced label shifts"),
        imagenet_c("bs1-3", "bs1", 3, "ImageNet-C, severity 3, one image at a time"),
        imagenet_c("vit-l-normal", "normal", 5, "ViT-L/16, batches of 32", VIT_L, batch_size=32, methods=four),
        imagenet_c("vit-l-bs1", "bs1", 5, "ViT-L/16, one image at a time", VIT_L, methods=four),
        imagenet_c("mixed", "mixed", 5, "all corruptions shuffled together; not printed in the paper"),
    ]  # fmt: skip
    return {experiment.name: experiment for experiment in made}


def find(name: str) -> Experiment:
    """Return an experiment by its name, with or without `table-`."""
    known = experiments()
    for full in (name, f"table-{name}", f"figure-{name}"):
        if full in known:
            return known[full]
    drawing = figures().get(name.removeprefix("figure-"))
    if drawing is not None:
        how = f" `acclimate analyze {ANALYSES[drawing.key]}` draws its counterpart." if drawing.key in ANALYSES else ""
        raise ConfigError(f"{name} is a drawing of the paper, not a grid of runs: {drawing.shows}{how}")
    raise ConfigError(f"Unknown experiment {name!r}.{suggest(name, known, 0.4)} There are: {', '.join(known)}.")


def run(
    experiment: Experiment,
    root: str | None = None,
    *,
    scale: str = "full",
    source_models: str | None = None,
    denoiser: str | None = None,
    **options: Any,
) -> Iterator[tuple[str, Results, PublishedTable | None]]:
    """Run an experiment, and yield its tables, each with a title and with the paper's.

    Args:
        experiment: Which.
        root: Where its data set is.
        scale: "full", or "small" for the bundled model and images.
        source_models: For Office-Home a folder with what `train-source` wrote: Art.safetensors, Clipart.safetensors ...
        denoiser: DDA's diffusion model, or a folder that `acclimate dda` wrote; without one, DDA is left out.
        **options: For `acclimate.bench`: source_statistics, execution, out, fresh, reference ... Methods that need source
            statistics are left out without.
    """
    if scale not in ("full", "small"):
        raise ConfigError(f"scale={scale!r}: full or small.")
    without = [] if scale == "small" else experiment.lacking(options.get("source_statistics"), denoiser)
    given = {}
    if denoiser is not None:
        given["dda"] = ("dda", {"generated" if Path(denoiser).is_dir() else "denoiser": denoiser})
    methods = [given.get(m, m) if isinstance(m, str) else m for m in experiment.methods if m not in without]
    grid: dict[str, Any] = {"seeds": SEEDS, **experiment.grid, "methods": methods}
    paper = tables().get(experiment.reported or "")
    if scale == "small":
        yield f"{experiment.shows}: small, bundled model and images", bench(**small_grid(experiment, grid), **options), None
        return
    if root is None:
        raise ConfigError(
            f"{experiment.name} needs {experiment.data}: say where it is (--root), or try it with --scale small."
        )
    if experiment.data != "office-home":
        yield experiment.shows, bench(experiment.model, experiment.data, root, **grid, **options), paper
        return
    if source_models is None:
        raise ConfigError(
            "Office-Home needs a source model for each domain: make them with `acclimate train-source --data office-home "
            "--domain Art --out models/Art.safetensors ...` and give their folder (--source-models models)."
        )
    for source in OFFICE:
        targets = [domain for domain in OFFICE if domain != source]
        model = str(Path(source_models) / f"{source}.safetensors")
        # the paper's columns are pairs, ours the targets of one source: they do not stand in one table
        yield f"Office-Home from {source}", bench(model, "office-home", root, domains=targets, **grid, **options), None


def small_grid(experiment: Experiment, grid: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what `acclimate.bench` is asked for at the small scale."""
    grid = {"seeds": SEEDS, **experiment.grid, "methods": experiment.methods} if grid is None else dict(grid)
    pairs = [(m, {}) if isinstance(m, str) else m for m in grid["methods"]]
    severity = grid.pop("severities", [5])[0]
    small = {
        **grid,
        "methods": [(name, {**find_method(name).info.quick, **given}) for name, given in pairs],
        "seeds": grid["seeds"][:1],
        "batch_size": min(32, grid.get("batch_size", 64)),
        "tuned": False,
    }
    if experiment.data != "imagenet-c":
        return {**small, "data": _stand_in(experiment.data, severity)}
    return {"corruptions": SMALL_CORRUPTIONS, **small, "severities": [severity], "images": SMALL_IMAGES}


def small_images(experiment: Experiment) -> int:
    """Return how many images each method meets at the small scale."""
    grid = small_grid(experiment)
    once = sum(len(d.labels) for d in grid["data"].domains) if "data" in grid else SMALL_IMAGES * len(grid["corruptions"])
    settings = grid.get("settings", "normal")
    return sum(2 * once if "label-shift" in s else once for s in ([settings] if isinstance(settings, str) else settings))


def _stand_in(data: str, severity: int) -> Data:
    """Return bundled images with what is peculiar to a data set: some of the classes, unknown ones, several domains."""
    how: dict[str, Any] = dict(mean=bundled.MEAN, std=bundled.STD)
    everything = bundled.images()
    images = _part(everything, Subset.sample(Corrupted(everything, **how), SMALL_IMAGES).chosen)
    classes: list[int] | None = None
    unknown: int | None = None
    names = ["fog"]
    if data == "imagenet-r":
        classes = [0, 2, 3, 7, 9]
        images = _part(images, np.flatnonzero(np.isin(images.labels, classes)))
        images = images._replace(labels=np.searchsorted(classes, images.labels).astype(np.int64))
    elif data == "visda-2021":
        unknown = len(bundled.CLASSES)
        images = images._replace(labels=np.where(images.labels == 8, unknown, images.labels))
    else:
        names = ["fog", "contrast", "pixelate"]
    shown = bundled.CLASSES if classes is None else [bundled.CLASSES[i] for i in classes]
    return Data(f"{data} (stand-in)", [Corrupted(images, name, severity, **how) for name in names], shown, classes, unknown)


def _part(images: Images, chosen: npt.NDArray[np.int64]) -> Images:
    return Images(images.pixels[chosen], images.labels[chosen], images.indices[chosen])
