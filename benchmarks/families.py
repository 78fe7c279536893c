"""What a step costs on each family of models, in plain forward passes, and beside plain loops of the same algorithms.

    python benchmarks/families.py                # one row per family
    python benchmarks/families.py --markdown     # the same as a table of docs/models.md

The models have the sizes of the published ones and random weights. Each step is timed between two plain forward passes of
the same batch, in one run, so that a busy machine slows both; the median of several rounds counts. The plain loops of TENT,
ETA and SAR are the released algorithms in a few lines of torch, with the whole batch in one pass. Adapter and loop take
turns, without a guard, and learn from every sample. The last columns are the ratios of their medians.
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
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import acclimate
from acclimate.core.engine import entropy
from acclimate.evaluation.cost import measure
from acclimate.methods._leading import leading_blocks
from acclimate.models.families import view_of
from acclimate.models.view import BATCH_NORMS, parameters_of

FAMILIES = (
    "vit_small_patch16_224", "resnet50", "resnet50_gn", "efficientnet_b0", "convnext_tiny", "swin_tiny_patch4_window7_224",
    "mixer_s16_224", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3",
)  # fmt: skip


METHODS = ("tent", "keel", "t3a", "dct")
EVERY = 9.0  # nats: a margin above every entropy, so that every sample is used, as in the first steps under a shift


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names of timm, separated by commas")
    parser.add_argument("--markdown", action="store_true", help="print a table of Markdown")
    options = parser.parse_args()
    columns = ("family", "forward, ms/image", *METHODS, *(f"{name} / plain loop" for name in PLAIN))
    rows = [
        (name, *measured(name, options.batch_size, options.rounds))
        for name in track(options.families.split(","), console=Console(stderr=True), transient=True)
    ]
    if options.markdown:
        for row in (columns, ("---", *("---:" for _ in columns[1:])), *rows):
            print(f"| {' | '.join(row)} |")
        return
    table = Table(title=f"One step, batches of {options.batch_size}: forward passes", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "family" else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def measured(name: str, batch_size: int, rounds: int) -> list[str]:
    """Return the cells of the row of a model: the time of a forward pass, costs, and ratios to plain loops."""
    model = timm.create_model(name, num_classes=1000).eval()
    seen = view_of(model)
    side = (seen.usual_size or (224, 224))[0]
    batches = [torch.randn(batch_size, 3, side, side) for _ in range(rounds + 1)]
    costs = []
    for method in METHODS:
        suits = method != "dct" or {"attention", "class token"} <= {*seen.parts}
        more = {"margin": EVERY} if method in ("keel", "dct") else {}
        costs.append(measure(model, method, batches, options=more) if suits else None)
    forward = 1000 * costs[0].seconds / costs[0].ratio / batch_size if costs[0] else 0.0
    shown = ["" if cost is None else f"{cost.ratio:.2f}" for cost in costs]
    return [f"{forward:.0f}", *shown, *(f"{beside_plain(method, model, batches):.2f}" for method in PLAIN)]


def beside_plain(method: str, model: nn.Module, batches: list[Tensor]) -> float:
    """Return the time of a step, divided by that of a plain loop: the ratio of the medians, in turns."""
    loop, options = PLAIN[method]
    adapter = acclimate.adapt(copy.deepcopy(model), method, guard=None, **options)
    plain = loop(copy.deepcopy(model))
    times: dict[Callable[[Tensor], Tensor], list[float]] = {adapter: [], plain: []}
    for i, images in enumerate(batches):
        for step, seconds in times.items():
            start = time.perf_counter()
            step(images)
            if i:  # the first batch builds the optimizer and fills caches
                seconds.append(time.perf_counter() - start)
    ours, theirs = (statistics.median(seconds) for seconds in times.values())
    return ours / theirs


def adapted(model: nn.Module, norms: list[nn.Module]) -> list[nn.Parameter]:
    """Let BatchNorm use the statistics of the batch, and return the parameters of some norms, which can learn."""
    model.eval().requires_grad_(False)
    for norm in view_of(model).norms:
        if isinstance(norm, BATCH_NORMS):
            norm.train()
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = None
    chosen = parameters_of(norms)
    for p in chosen:
        p.requires_grad_(True)
    return chosen


def plain_tent(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return one step of TENT as its authors write it."""
    optimizer = torch.optim.SGD(adapted(model, view_of(model).norms), lr=0.00025, momentum=0.9)

    def step(images: Tensor) -> Tensor:
        logits = model(images)
        entropy(logits).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach()

    return step


def plain_eta(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return one step of ETA as its authors write it."""
    optimizer = torch.optim.SGD(adapted(model, view_of(model).norms), lr=0.00025, momentum=0.9)
    average: Tensor | None = None

    def step(images: Tensor) -> Tensor:
        nonlocal average
        logits = model(images)
        h = entropy(logits)
        reliable = torch.where(h < EVERY)[0]
        h, new = h[reliable], logits[reliable].softmax(1).detach()
        if average is not None:
            different = F.cosine_similarity(average[None], new, dim=1).abs() < EVERY
            h, new = h[different], new[different]
        average = new.mean(0) if average is None else 0.9 * average + 0.1 * new.mean(0)
        (h * (EVERY - h.detach()).exp()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach()

    return step


def plain_sar(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return one step of SAR as its authors write it, without the recovery."""
    stages = view_of(model).stages
    chosen = adapted(model, [norm for i in leading_blocks(len(stages)) for norm in stages[i]])
    optimizer = torch.optim.SGD(chosen, lr=0.00025, momentum=0.9)

    def step(images: Tensor) -> Tensor:
        logits = model(images)
        h = entropy(logits)
        reliable = torch.where(h < EVERY)[0]
        h[reliable].mean().backward()
        gradients = [p.grad for p in chosen if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        moves = [gradient * (0.05 / (norm + 1e-12)) for gradient in gradients]
        with torch.no_grad():
            for p, move in zip(chosen, moves):
                p.add_(move)
        optimizer.zero_grad()
        h = entropy(model(images))[reliable]
        h[h < EVERY].mean().backward()
        with torch.no_grad():
            for p, move in zip(chosen, moves):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach()

    return step


PLAIN: dict[str, tuple[Callable[[nn.Module], Callable[[Tensor], Tensor]], dict[str, float]]] = {
    "tent": (plain_tent, {}),
    "eta": (plain_eta, {"margin": EVERY, "redundancy": EVERY}),
    "sar": (plain_sar, {"margin": EVERY}),
}


if __name__ == "__main__":
    main()
