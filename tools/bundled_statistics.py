"""Compute the source statistics of the bundled model, for methods that need some, and write them into the package.

    python tools/bundled_statistics.py --data DIR

DIR holds Fashion-MNIST's training files as they are distributed. 2000 of these images are drawn, always the same ones; the
Fisher information is that of batches of 64.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import acclimate
from acclimate.data import bundled
from acclimate.data.domains import Corrupted, Subset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with train-images-idx3-ubyte.gz")
    parser.add_argument("--out", type=Path, default=bundled.STATISTICS)
    options = parser.parse_args()
    train = Subset.sample(Corrupted(bundled.read(options.data, "train"), mean=bundled.MEAN, std=bundled.STD), 2000)
    images = train.load(np.arange(len(train.labels)))
    statistics = acclimate.source_statistics(bundled.model(), images, labels=torch.from_numpy(train.labels))
    statistics.save(options.out)
    print(f"{options.out}: {statistics}")


if __name__ == "__main__":
    main()
