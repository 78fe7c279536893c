"""What the bench costs beside the model: loading, scoring, records, states. And how fast images are loaded from a disk.

    python benchmarks/bench.py

The overhead of a run is the time outside of the adapter over the time inside it, in one and the same run, so that a busy
machine slows both. The stream shows clean images: making corruptions is measured by `benchmarks/corruptions.py`.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import acclimate
from acclimate.core.registry import find_method
from acclimate.data import bundled
from acclimate.data.disk import Files
from acclimate.data.domains import Corrupted, Subset
from acclimate.data.preprocess import Preprocess
from acclimate.data.streams import Stream
from acclimate.evaluation.jobs import Job, run_job
from acclimate.evaluation.run import run
from acclimate.evaluation.spec import Protocol, describe, specify
from acclimate.evaluation.store import Store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="of a stream of batches of 64; default: %(default)s")
    parser.add_argument("--singles", type=int, default=300, help="of a stream of one at a time; default: %(default)s")
    parser.add_argument("--files", type=int, default=400, help="JPEG files to load; default: %(default)s")
    options = parser.parse_args()
    console = Console()

    table = Table(title="Overhead of a run around the adapter, bundled model, clean images", title_justify="left")
    for column in ("method", "batch", "in the adapter", "whole run", "overhead"):
        table.add_column(column, justify="right")
    for method in ("source", "tent", "dct"):
        for batch_size, count in ((64, options.images), (1, options.singles)):
            inside, whole = overhead(method, batch_size, count)
            share = whole / inside - 1
            table.add_row(method, str(batch_size), f"{inside:.2f} s", f"{whole:.2f} s", f"{share:.1%}")
    console.print(table)

    few, many = (memory(count) for count in (options.images // 2, 3 * options.images))
    console.print(
        f"peak memory after {options.images // 2} images {few:.0f} MiB, after {3 * options.images} more {many:.0f} MiB"
    )

    table = Table(title=f"Loading {options.files} JPEG files (500 x 375 to 256 to 224 pixels)", title_justify="left")
    for column in ("workers", "images per second"):
        table.add_column(column, justify="right")
    for workers, speed in loading(options.files):
        table.add_row(str(workers), f"{speed:.0f}")
    console.print(table)


def clean_images(count: int) -> Subset:
    """So many clean images of the bundled ones."""
    return Subset.sample(Corrupted(bundled.images(), mean=bundled.MEAN, std=bundled.STD), count)


def overhead(method: str, batch_size: int, count: int) -> tuple[float, float]:
    """Seconds inside of the adapter, and of the whole run with its records and its result."""
    clean = clean_images(count)
    stream, model = Stream(clean, batch_size=batch_size), bundled.model()
    job = Job(specify(stream, method, {}, model=describe(model, "bundled")), stream, find_method(method))
    with tempfile.TemporaryDirectory() as folder:
        run_job(model, Job(job.spec, Stream(clean, batch_size=count), job.method), Store(Path(folder) / "warm"), Protocol())
        start = time.perf_counter()
        result = run_job(model, job, Store(folder), Protocol())
        return result.seconds, time.perf_counter() - start


def memory(count: int) -> float:
    """The process's highest memory so far, in MiB, after a stream."""
    clean = clean_images(count)
    adapter = acclimate.adapt(bundled.model(), "tent")
    run(adapter, Stream(clean))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def loading(count: int) -> list[tuple[int, float]]:
    """Images per second by number of workers; files in the system's cache."""
    rng = np.random.default_rng(0)
    smooth = [Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375)) for _ in range(20)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(count):
            smooth[i % len(smooth)].save(Path(folder) / f"{i}.jpg", quality=90)
        how = Preprocess(256, 224, (0.5,) * 3, (0.5,) * 3)
        domain = Files(folder, [f"{i}.jpg" for i in range(count)], [0] * count, how)
        for workers in (0, 1, os.cpu_count() or 1):
            start = time.perf_counter()
            shown = sum(len(batch.labels) for batch in Stream(domain, workers=workers))
            found.append((workers, shown / (time.perf_counter() - start)))
    return found


if __name__ == "__main__":
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    main()
