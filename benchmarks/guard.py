"""What the guard costs: a step with it and without it, side by side.

    python benchmarks/guard.py [--model vit_tiny_patch16_224] [--methods tent,eta,dct,keel,neo] [--rounds 3]
        [--threads 1]

Two adapters of equal models meet the same images in turns, one with a guard and one without. The first 256 images are not
measured: while a run is new, the guard compares more images. Methods with a learning rate have a tiny one, which changes no
prediction: with a real one they collapse on these random images, and a run on trial costs more. The ratio is that of the
median processor times of a batch of 64, or of 64 single images, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import statistics
import time

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import acclimate
from acclimate.core.registry import find_method

NEW = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="of timm, with random weights; default: %(default)s")
    parser.add_argument("--methods", default="tent,eta,dct,keel,neo", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="batches of 64, and rounds of 64 single images")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table(title=f"Cost of the guard, {options.model}, {torch.get_num_threads()} threads", title_justify="left")
    for column in ("method", "batch", "without", "with", "ratio"):
        table.add_column(column, justify="right")
    for method in options.methods.split(","):
        for batch_size in (64, 1):
            plain, guarded = measured(options.model, method, batch_size, options.rounds)
            table.add_row(method, str(batch_size), f"{plain:.2f} s", f"{guarded:.2f} s", f"{guarded / plain:.3f}")
    Console().print(table)


def measured(name: str, method: str, batch_size: int, rounds: int) -> tuple[float, float]:
    """The median time for 64 images, without and with the guard."""
    options = {"lr": 1e-12} if "lr" in find_method(method).options() else {}
    adapters = [acclimate.adapt(source(name), method, guard=guard, **options) for guard in (None, "default")]
    generator = torch.Generator().manual_seed(0)
    size = adapters[0].engine.view.image_size or (224, 224)
    adapters[1].guard.met.fill_(NEW)  # as after the first images
    times: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        images = torch.randn(64, 3, *size, generator=generator)
        for which in (0, 1) if number % 2 else (1, 0):
            seconds = passed(adapters[which], images, batch_size)
            if number:  # the first round warms up
                times[which].append(seconds)
    return statistics.median(times[0]), statistics.median(times[1])


def passed(adapter: acclimate.Adapter, images: Tensor, batch_size: int) -> float:
    start = time.process_time()
    for part in images.split(batch_size):
        adapter(part)
    return time.process_time() - start


def source(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name)
    with torch.no_grad():
        model.head.weight.normal_(std=0.15)  # sure of some images, unsure of others
    return model


if __name__ == "__main__":
    main()
