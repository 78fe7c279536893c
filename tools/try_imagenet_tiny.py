"""Compare methods on real photographs, with an ImageNet ViT-Tiny, under all 15 corruptions.

    python tools/try_imagenet_tiny.py --assets DIR [--severities 5,3] [--corruptions fog,snow] [--methods source,dct,keel]

DIR holds `vit_tiny_patch16_224.in1k.safetensors` (a state dict of timm's `vit_tiny_patch16_224` for ImageNet-1k, normalised
with 0.5) and `nips17/` with 1000 labelled photographs. Every method runs with its own defaults, from the source model for
each corruption, on the same photographs in the same order, in batches of 64. Finished runs are kept in runs/imagenet-tiny,
so that an interrupted table goes on where it was. The tables are printed as Markdown, each with the differences between the
row of --against and every other one over all corruptions, paired by photograph. A cell of 1000 images has a standard error
of up to 1.6 points; as all cells show the same photographs, that of a mean is not much smaller.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import timm
from PIL import Image
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file
from timm.data import resolve_model_data_config

from acclimate.cli._arguments import methods
from acclimate.cli._parser import words
from acclimate.data.corruptions import CORRUPTIONS
from acclimate.data.domains import CLEAN, Corrupted, Domain, Images, Subset
from acclimate.data.streams import Stream
from acclimate.evaluation.formats import markdown, terminal
from acclimate.evaluation.grid import run_grid
from acclimate.evaluation.store import Store
from acclimate.evaluation.tables import Grid, Summary
from acclimate.evaluation.testbed import Testbed, open_testbed

WEIGHTS = "vit_tiny_patch16_224.in1k.safetensors"
SIZE = 224


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="the folder with the weights and the photographs")
    parser.add_argument("--severities", default="5,3", help="default: %(default)s")
    parser.add_argument("--corruptions", default=",".join(CORRUPTIONS), help="default: all 15")
    parser.add_argument("--methods", type=words, default="source,tent,sar,dct,eta,neo,keel", help="default: %(default)s")
    parser.add_argument("--against", default="keel", help="row that is compared with every other one; default: %(default)s")
    parser.add_argument("--images", type=int, help="number of photographs, always the same ones; default: all")
    parser.add_argument("--runs", type=Path, default=Path("runs/imagenet-tiny"))
    options = parser.parse_args()
    console = Console()
    for severity in map(int, options.severities.split(",")):
        testbed = photographed(options.assets, options.corruptions.split(","), severity, options.images)
        outcomes = run_grid(
            testbed,
            [Stream(domain, seed=0) for domain in testbed.data.domains],
            [(each, {}) if isinstance(each, str) else each for each in methods(options.methods)],
            store=Store(options.runs),
            console=console,
        )
        grid = Grid(outcomes)
        console.print(terminal(grid, f"Top-1 in %, severity {severity}, {len(testbed.data.domains[0].labels)} photographs"))
        print(markdown(grid))
        print("\n".join(compared(grid, options.against)))


def photographed(assets: Path, corruptions: Sequence[str], severity: int, count: int | None) -> Testbed:
    """Return the model, with so many photographs under some corruptions (all if `count` is None). "clean" is none."""
    if not (assets / WEIGHTS).exists():
        sys.exit(f"skipped: {assets / WEIGHTS} is not there.")
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False)
    model.load_state_dict(load_file(assets / WEIGHTS))
    normalisation = {key: resolve_model_data_config(model)[key] for key in ("mean", "std")}
    images = photographs(assets / "nips17")
    domains: list[Domain] = [
        Corrupted(images, name, None if name == CLEAN else severity, **normalisation) for name in corruptions
    ]
    if count:
        domains = [Subset.sample(domain, count) for domain in domains]
    return open_testbed(model.eval(), domains, model_name="vit_tiny_patch16_224.in1k")


def compared(grid: Grid, name: str) -> list[str]:
    """Lines with the difference between the mean of one row and that of every other."""
    return [
        f"{name} above {grid.label(other)}: {grid.difference(row, other, Summary.MEAN)}"
        for row in grid.rows
        if grid.label(row) == name
        for other in grid.rows
        if other != row
    ]


def photographs(folder: Path) -> Images:
    """The photographs, cropped to the model's size, and their ImageNet classes."""
    with (folder / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    pixels = np.empty((len(rows), SIZE, SIZE, 3), np.uint8)
    for i, row in enumerate(track(rows, description="photographs", console=Console(stderr=True), transient=True)):
        image = Image.open(folder / row["file"]).convert("RGB")
        left, top = ((side - SIZE) // 2 for side in image.size)
        pixels[i] = np.asarray(image.crop((left, top, left + SIZE, top + SIZE)))
    return Images(pixels, np.array([int(row["label"]) for row in rows]), np.arange(len(rows)))


if __name__ == "__main__":
    main()
