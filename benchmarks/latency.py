"""How long a caller waits for its logits: a plain forward pass, the blocking step and `reply="first"`, side by side.

    python benchmarks/latency.py [--model vit_base_patch16_224] [--batches 16,1] [--repeats 5] [--threads 2]

The three are measured in turns. A number is the median over the repeats of the time of a call, divided by that of the plain
forward pass `model(images)` beside it, without gradients and in evaluation mode. Before each call, the step before it has
ended. The last column is the time until the adapter is free again. The weights are random, with a head that is sure of some
images.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from step import source
from torch import Tensor

import acclimate

METHODS = ("tent", "sar", "eta", "dct", "keel")


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measured(name: str, method: str, images: Tensor, repeats: int) -> list[float]:
    """Return the ratios of a blocking call, of a call with reply="first", and of the latter until its step has ended."""
    plain = source(name).eval()
    blocking, first = (acclimate.adapt(source(name), method, reply=reply) for reply in ("last", "first"))

    def forward() -> None:
        with torch.no_grad():
            plain(images)

    for warm in (forward, lambda: blocking(images), lambda: first(images)):
        warm()
    ratios = []
    for _ in range(repeats):
        first.close()
        unit = seconds(forward)
        last = seconds(lambda: blocking(images))
        reply = seconds(lambda: first(images))
        ratios.append((last / unit, reply / unit, (reply + seconds(first.close)) / unit))
    return [statistics.median(column) for column in zip(*ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--batches", default="16,1")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{'method':8} {'batch':>5} {'blocking':>9} {'first':>7} {'all':>7}   in plain forward passes")
    for size in map(int, given.batches.split(",")):
        images = torch.randn(size, 3, 224, 224, generator=torch.Generator().manual_seed(1))
        for method in given.methods.split(","):
            last, reply, whole = measured(given.model, method, images, given.repeats)
            print(f"{method:8} {size:5} {last:9.2f} {reply:7.2f} {whole:7.2f}", flush=True)


if __name__ == "__main__":
    main()
