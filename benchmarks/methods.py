"""What one step of every method costs, in plain forward passes of the same model, and the memory that it needs.

    python benchmarks/methods.py

Each step is timed between two plain forward passes of the same batch, in one run, so that a busy machine slows both; the
median of several rounds counts. The model is the bundled ViT, so the passes are small: what a method does beside them
weighs more here than for ViT-B. Beside it stand the times that the DCT paper gives for 50 000 images on an RTX 3090.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from acclimate.core.registry import find_method, fitting_methods
from acclimate.core.statistics import choose_statistics
from acclimate.data import bundled
from acclimate.data.domains import Corrupted
from acclimate.data.streams import Stream
from acclimate.evaluation.cost import measure
from acclimate.models.families import view_of

PAPER = {"tent": "5 min", "sar": "7 min", "dct": "8 min", "memo": "14 h", "dda": "5 days"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--methods", help="separated by commas; default: all")
    options = parser.parse_args()
    console = Console()
    names = options.methods.split(",") if options.methods else fitting_methods(view_of(bundled.model()))
    images = bundled.images().sample(options.batch_size * (options.rounds + 1))
    glass = Corrupted(images, "glass_blur", 2, mean=bundled.MEAN, std=bundled.STD, constants="imagenet-c")
    batches = [batch.images for batch in Stream(glass, batch_size=options.batch_size)]
    table = Table(title=f"One step, bundled ViT, batches of {options.batch_size}", title_justify="left")
    for column in ("method", "forward passes", "ms/image", "samples forward", "backward", "peak MiB", "paper"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name in track(names, console=Console(stderr=True), transient=True):
        table.add_row(name, *measured(name, batches), PAPER.get(name, ""))
    console.print(table)


def measured(name: str, batches: list[torch.Tensor]) -> list[str]:
    needs = find_method(name).info.needs
    source = choose_statistics(bundled.source_statistics(), needs) if needs else None
    cost = measure(bundled.model(), name, batches, options=bundled.ASSETS.get(name), source_statistics=source)
    each = 1000 * cost.seconds / len(batches[1])
    memory = "" if cost.peak_mib is None else f"{cost.peak_mib:.0f}"
    return [f"{cost.ratio:.1f}", f"{each:.1f}", f"{cost.forward:.2f}", f"{cost.backward:.2f}", memory]


if __name__ == "__main__":
    main()
