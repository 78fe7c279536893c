"""What a step costs on each family of models, in plain forward passes, and beside a plain loop of the same algorithm.

    python benchmarks/families.py

The models have the sizes of the published ones and random weights. Each step is timed between two plain forward passes of
the same batch, in one run, so that a busy machine slows both; the median of several rounds counts. The plain loop of TENT is
the released algorithm in a few lines of torch, with the whole batch in one pass. The two take turns, without a guard, and
the last column is the ratio of their medians.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import timm
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import acclimate
from acclimate.core.engine import entropy
from acclimate.evaluation.cost import measure
from acclimate.models.families import view_of
from acclimate.models.view import BATCH_NORMS, parameters_of

FAMILIES = (
    "vit_small_patch16_224", "resnet50", "resnet50_gn", "efficientnet_b0", "convnext_tiny", "swin_tiny_patch4_window7_224",
    "mixer_s16_224", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names of timm, separated by commas")
    options = parser.parse_args()
    table = Table(title=f"One step, batches of {options.batch_size}: forward passes", title_justify="left")
    for column in ("family", "forward, ms/image", "tent", "keel", "t3a", "dct", "tent / plain loop"):
        table.add_column(column, justify="left" if column == "family" else "right")
    for name in track(options.families.split(","), console=Console(stderr=True), transient=True):
        table.add_row(name, *measured(name, options.batch_size, options.rounds))
    Console().print(table)


def measured(name: str, batch_size: int, rounds: int) -> list[str]:
    model = timm.create_model(name, num_classes=1000).eval()
    seen = view_of(model)
    side = (seen.usual_size or (224, 224))[0]
    batches = [torch.randn(batch_size, 3, side, side) for _ in range(rounds + 1)]
    costs = []
    for method in ("tent", "keel", "t3a", "dct"):
        suits = method != "dct" or {"attention", "class token"} <= {*seen.parts}
        # every sample is used, as in the first steps under a shift
        more = {"margin": 9.0} if method in ("keel", "dct") else {}
        costs.append(measure(model, method, batches, options=more) if suits else None)
    forward = 1000 * costs[0].seconds / costs[0].ratio / batch_size if costs[0] else 0.0
    shown = ["" if cost is None else f"{cost.ratio:.2f}" for cost in costs]
    return [f"{forward:.0f}", *shown, f"{beside_plain(model, batches):.2f}"]


def beside_plain(model: nn.Module, batches: list[Tensor]) -> float:
    """Return the time of a step of TENT, divided by that of a plain loop: the ratio of the medians, in turns."""
    adapter, plain = acclimate.adapt(copy.deepcopy(model), "tent", guard=None), plain_tent(copy.deepcopy(model))
    times: dict[Callable[[Tensor], Tensor], list[float]] = {adapter: [], plain: []}
    for i, images in enumerate(batches):
        for step, seconds in times.items():
            start = time.perf_counter()
            step(images)
            if i:  # the first batch builds the optimizer and fills caches
                seconds.append(time.perf_counter() - start)
    ours, theirs = (statistics.median(seconds) for seconds in times.values())
    return ours / theirs


def plain_tent(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return one step of TENT as its authors write it."""
    model.eval().requires_grad_(False)
    norms = view_of(model).norms
    for norm in norms:
        norm.requires_grad_(True)
        if isinstance(norm, BATCH_NORMS):
            norm.train()
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = None
    optimizer = torch.optim.SGD(parameters_of(norms), lr=0.00025, momentum=0.9)

    def step(images: Tensor) -> Tensor:
        logits = model(images)
        entropy(logits).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach()

    return step


if __name__ == "__main__":
    main()
