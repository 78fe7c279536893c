"""Train the bundled denoiser on Fashion-MNIST's training images, and write its weights into the package.

    nice -n 19 python tools/train_denoiser.py --data DIR

Its log ended, after half an hour on busy cores, with

    update 1600/1600  loss 0.0411  1694 s

DIR holds Fashion-MNIST's files as they are distributed. The network is ADM's U-Net, very small; it learns to predict the
noise by its mean squared error, at the earlier steps alone (`LAST` of 1000), for DDA begins no later. No corruption is used.
The weights are a moving average. It sees 25 600 images, not half an epoch: enough to see DDA work, not for a good generator.

Every update draws from a generator seeded with (seed, update) and every hundredth is followed by a checkpoint, so that an
interrupted training goes on and ends with the same weights, on the same machine with the same number of threads.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from acclimate.data import bundled
from acclimate.methods.dda import unet
from acclimate.methods.dda.process import Schedule

ARCHITECTURE = unet.Architecture(
    size=bundled.SIZE,
    width=16,
    multipliers=(1, 2, 2),
    blocks=1,
    attention=(7,),
    head_width=16,
    groups=8,
    learned_variance=False,
)
LAST, LR, WARMUP, AVERAGE = 600, 2e-3, 50, 0.99
EVERY = 100  # updates between checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with train-images-idx3-ubyte.gz")
    parser.add_argument("--updates", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/train_denoiser.pt"))
    parser.add_argument("--out", type=Path, default=bundled.DENOISER)
    options = parser.parse_args()

    console = Console()
    torch.set_num_threads(options.threads)
    train = bundled.read(options.data, "train").pixels
    torch.manual_seed(options.seed)
    net = unet.UNet(ARCHITECTURE)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(AVERAGE))
    optimizer = torch.optim.Adam(net.parameters())
    parts: dict[str, Any] = {"net": net, "average": average, "optimizer": optimizer}
    recipe = str([options.updates, options.batch_size, options.seed, ARCHITECTURE, LAST, LR, WARMUP, AVERAGE])
    first = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        if saved["recipe"] != recipe:
            sys.exit(f"{options.checkpoint} is of another training: remove it, or give another --checkpoint.")
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["updates"]
        console.print(f"going on after update {first} of {options.checkpoint}")

    kept = torch.tensor(Schedule().kept).float().view(-1, 1, 1, 1)
    began, total = time.perf_counter(), 0.0
    for update in range(first, options.updates):
        rng = torch.Generator().manual_seed(options.seed * 10**6 + update)
        chosen = torch.randint(len(train), (options.batch_size,), generator=rng).numpy()
        images = bundled.PREPROCESS.normalised(train[chosen])  # which is from -1 to 1
        steps = torch.randint(LAST, (len(images),), generator=rng)
        noise = torch.randn(images.shape, generator=rng)
        noisy = kept[steps].sqrt() * images + (1 - kept[steps]).sqrt() * noise
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(update, options.updates)
        loss = torch.nn.functional.mse_loss(net(noisy, steps), noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(net)
        total += loss.item()
        if (update + 1) % EVERY == 0 or update + 1 == options.updates:
            state = {name: part.state_dict() for name, part in parts.items()} | {"updates": update + 1, "recipe": recipe}
            options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, options.checkpoint.with_suffix(".tmp"))
            os.replace(options.checkpoint.with_suffix(".tmp"), options.checkpoint)
            count = (update + 1) % EVERY or EVERY
            console.print(
                f"update {update + 1}/{options.updates}  loss {total / count:.4f}  {time.perf_counter() - began:.0f} s"
            )
            total = 0.0
    about = {"trained_by": "tools/train_denoiser.py", "data": "Fashion-MNIST, 60000 images", "steps": f"0 to {LAST - 1}"}
    net.load_state_dict(average.module.state_dict())
    unet.write(options.out, net, about)


def learning_rate(update: int, updates: int) -> float:
    """A cosine down to zero, with a short warm-up."""
    return LR * min(1.0, (update + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * update / updates))


if __name__ == "__main__":
    main()
