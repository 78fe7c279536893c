"""Compute the source statistics of the bundled model, for methods that need some, and write them into the package.

    python tools/bundled_statistics.py [--data DIR]

DIR holds Fashion-MNIST's training files as they are distributed. 2000 of these images are drawn, always the same ones; the
Fisher information is that of batches of 64. Without DIR, only the logits are computed. They are not those of training
images, of which the model is surer than of others, but of clean images that it was not trained on, as those of POEM's
authors: the 2000 bundled test images that are for tuning, which are in no stream of the bench.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import acclimate
from acclimate.core.statistics import SourceStatistics, computed_kinds
from acclimate.data import bundled
from acclimate.data.domains import Corrupted, Images, Subset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with train-images-idx3-ubyte.gz")
    parser.add_argument("--out", type=Path, default=bundled.STATISTICS, help="for the statistics of training images")
    parser.add_argument("--logits", type=Path, default=bundled.LOGITS, help="for the logits of the images for tuning")
    options = parser.parse_args()
    if options.data is not None:
        kinds = [kind for kind in computed_kinds() if kind != "logits"]
        write(options.out, statistics_of(bundled.read(options.data, "train"), 2000, kinds))
    images = bundled.images()
    count = bundled.FOR_TUNING
    write(options.logits, statistics_of(images, count, ["logits"], skip=len(images.labels) - count))


def statistics_of(images: Images, count: int, kinds: list[str], *, skip: int = 0) -> SourceStatistics:
    """Return statistics of images that are drawn after the first `skip` ones of the draw."""
    drawn = Subset.sample(Corrupted(images, mean=bundled.MEAN, std=bundled.STD), count, skip=skip)
    pixels, labels = drawn.load(np.arange(count)), torch.from_numpy(drawn.labels)
    return acclimate.source_statistics(bundled.model(), pixels, labels=labels, kinds=kinds)


def write(out: Path, statistics: SourceStatistics) -> None:
    """Write statistics to a file, and say so."""
    statistics.save(out)
    print(f"{out}: {statistics}")


if __name__ == "__main__":
    main()
