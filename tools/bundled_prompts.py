"""Train what DePT-G begins with for the bundled model, and write it into the package.

    python tools/bundled_prompts.py --data DIR

DIR holds Fashion-MNIST's training files as they are distributed. The recipe is that of `acclimate train-prompts`, shortened:
fewer images, always the same ones, and fewer steps; prompts and DINO heads are small, as the model is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from acclimate.data import bundled
from acclimate.data.domains import Corrupted, Subset
from acclimate.methods.dept.network import Sizes
from acclimate.methods.dept.training import PromptRecipe, train_prompts

SIZES = Sizes(prompts=8, hidden=128, bottleneck=64, outputs=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with train-images-idx3-ubyte.gz")
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=bundled.PROMPTS)
    options = parser.parse_args()
    train = Corrupted(bundled.read(options.data, "train"), mean=bundled.MEAN, std=bundled.STD)
    domain = Subset.sample(train, options.images)
    recipe = PromptRecipe(epochs=options.epochs, batch_size=64, warmup=40)
    made = train_prompts(
        bundled.model(), domain, bundled.CLASSES, options.out, sizes=SIZES, recipe=recipe, device="cpu", console=Console()
    )
    print(f"{options.out}: {made}")


if __name__ == "__main__":
    main()
