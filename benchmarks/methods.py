"""What one step of every method costs, in plain forward passes of the same model, and the memory that it needs.

    python benchmarks/methods.py

Each step is timed between two plain forward passes of the same batch, in one run, so that a busy machine slows both; the
median of several rounds counts. The model is the bundled ViT, so the passes are small: what a method does beside them
weighs more here than for ViT-B. Beside it stand the times that the DCT paper gives for 50 000 images on an RTX 3090.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import acclimate
from acclimate.bench.memory import peak_memory
from acclimate.data import bundled
from acclimate.data.datasets import Corrupted
from acclimate.data.streams import Stream
from acclimate.method import find

PAPER = {"tent": "5 min", "sar": "7 min", "dct": "8 min", "memo": "14 h"}  # DDA, which is not here: 5 days


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--methods", help="separated by commas; default: all")
    options = parser.parse_args()
    console = Console()
    names = options.methods.split(",") if options.methods else acclimate.list_methods()
    images = bundled.images().sample(options.batch_size * (options.rounds + 1))
    glass = Corrupted(images, "glass_blur", 2, mean=bundled.MEAN, std=bundled.STD, constants=bundled.CONSTANTS)
    batches = [batch.images for batch in Stream(glass, batch_size=options.batch_size)]
    table = Table(title=f"One step, bundled ViT, batches of {options.batch_size}", title_justify="left")
    for column in ("method", "forward passes", "ms/image", "samples forward", "backward", "peak MiB", "paper"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name in track(names, console=Console(stderr=True), transient=True):
        table.add_row(name, *measured(name, batches), PAPER.get(name, ""))
    console.print(table)


def measured(name: str, batches: list[torch.Tensor]) -> list[str]:
    plain = bundled.model()
    source = bundled.statistics() if find(name).needs else None
    adapter = acclimate.adapt(bundled.model(), name, source=source)
    adapter(batches[0])  # builds the optimizer, fills caches
    before = (adapter.engine.passes.forward, adapter.engine.passes.backward)
    ratios, seconds = [], []
    with peak_memory(torch.device("cpu")) as peak:
        for images in batches[1:]:
            around = [forward(plain, images)]
            start = time.perf_counter()
            adapter(images)
            seconds.append(time.perf_counter() - start)
            around.append(forward(plain, images))
            ratios.append(seconds[-1] / statistics.fmean(around))
    count = sum(len(images) for images in batches[1:])
    passed = (adapter.engine.passes.forward - before[0], adapter.engine.passes.backward - before[1])
    each = 1000 * statistics.median(seconds) / len(batches[1])
    memory = "" if peak.mib is None else f"{peak.mib:.0f}"
    return [f"{statistics.median(ratios):.1f}", f"{each:.1f}", *(f"{n / count:.2f}" for n in passed), memory]


@torch.inference_mode()
def forward(model: torch.nn.Module, images: torch.Tensor) -> float:
    start = time.perf_counter()
    model(images)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
