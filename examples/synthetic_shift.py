"""A small ViT meets a world that changed: train it for a minute on made-up stripes, then shift them and let it adapt.

    python examples/synthetic_shift.py

Nothing is downloaded. Twelve classes of stripes are drawn at random; the model (a timm VisionTransformer, 12 blocks) learns
them clean. The target stream is paler, tinted and noisy. Printed is the accuracy over the stream and over its second half,
for the source model and three ways to adapt. It is a demonstration, not a benchmark: one made-up data set, one seed.
"""

from __future__ import annotations

import copy
import math
import time

import torch
from rich.progress import track
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import acclimate

CLASSES, SIZE, BATCH = 12, 32, 64


def draw(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stripes of six directions, in two frequencies, at random phase, contrast and colour."""
    labels = torch.randint(CLASSES, (count,), generator=rng)
    angle = (labels % 6) * math.pi / 6 + 0.08 * torch.randn(count, generator=rng)
    frequency = torch.where(labels < 6, 0.35, 0.75) * (1 + 0.06 * torch.randn(count, generator=rng))
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    wave = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    phase = 2 * math.pi * torch.rand(count, 1, 1, generator=rng)
    stripes = (wave * frequency[:, None, None] + phase).sin()[:, None]
    colour = 0.4 + 0.6 * torch.rand(count, 3, 1, 1, generator=rng)
    images = stripes * colour + 0.15 * torch.randn(count, 3, SIZE, SIZE, generator=rng)
    return images.clamp(-1, 1), labels


def shift(images: Tensor, rng: torch.Generator) -> Tensor:
    """The world changes: less contrast, a tint, much more noise."""
    tint = torch.tensor([0.35, 0.0, -0.35])[:, None, None]
    return (0.35 * images + tint + 0.55 * torch.randn(images.shape, generator=rng)).clamp(-1, 1)


def train(rng: torch.Generator, steps: int = 260) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(img_size=SIZE, patch_size=8, embed_dim=64, depth=12, num_heads=4, num_classes=CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in track(range(steps), "training on clean images"):
        images, labels = draw(128, rng)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def main() -> None:
    rng = torch.Generator().manual_seed(1)
    source = train(rng)
    with torch.no_grad():
        images, labels = draw(1000, rng)
        clean = (source(images).argmax(1) == labels).float().mean().item()
    stream = [(shift(images, rng), labels) for images, labels in (draw(BATCH, rng) for _ in range(50))]
    print(f"\nclean accuracy {100 * clean:.1f} %; now {len(stream)} batches of {BATCH} from the shifted world\n")
    print(f"{'method':<10}{'accuracy':>10}{'2nd half':>10}{'seconds':>10}   last step")
    for method in ("source", "tent", "sar", "dct"):
        model = acclimate.adapt(copy.deepcopy(source), method)
        start = time.perf_counter()
        right = torch.cat([model(images).argmax(1) == labels for images, labels in stream]).float()
        seconds = time.perf_counter() - start
        half = right[len(right) // 2 :].mean()
        record = model.record
        assert record is not None
        print(
            f"{method:<10}{100 * right.mean():>9.1f}%{100 * half:>9.1f}%{seconds:>10.1f}   "
            f"entropy {record.entropy:.2f}, learned from {record.used} of {record.samples}, drift {record.drift:.4f}"
        )


if __name__ == "__main__":
    main()
