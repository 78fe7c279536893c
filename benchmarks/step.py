"""One DCT step, acclimate's against two straightforward forms of the same algorithm, side by side in one run.

A straightforward form passes the whole batch, computes an explicit attention matrix over n+1 queries and keys, loops over
tensors in the sharpness-aware step and passes the whole batch a second time. The first form leaves it to autograd what to
differentiate; the second, like the authors' code, freezes the parameters that are not adapted, so that no gradient of a
large weight matrix is computed. All get the same weights and images; the largest difference of their logits is printed.

    python benchmarks/step.py [--model vit_base_patch16_224] [--repeats 3] [--threads 2]

Timings on a shared machine are noisy: all forms are measured in turns, times are medians, and a ratio is the median of the
ratios of neighbouring runs. The last two lines have no straightforward form; their unit is one plain forward pass.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import acclimate
from acclimate.core.engine import entropy
from acclimate.methods.dct import DCT, Conditioner

LR, LR_GENERATOR, MOMENTUM, RHO = 1e-3, 1e-2, 0.9, 0.05


class ExplicitAttention(nn.Module):
    """timm's attention with a generated query, key and value appended, as the paper draws it."""

    def __init__(self, inner: nn.Module, conditioner: Conditioner | None) -> None:
        super().__init__()
        self.inner = inner
        self.generator = None
        if conditioner is not None:
            width = inner.qkv.in_features
            self.generator = nn.Linear(width, 3 * width)
            with torch.no_grad():
                self.generator.weight.copy_(torch.cat([conditioner.weights[part] for part in "qkv"]))
                self.generator.bias.copy_(torch.cat([conditioner.biases[part] for part in "qkv"]))

    def forward(self, x: Tensor, **_: object) -> Tensor:
        inner = self.inner
        batch, tokens, width = x.shape
        q, k, v = inner.qkv(x).reshape(batch, tokens, 3, inner.num_heads, -1).permute(2, 0, 3, 1, 4)
        if self.generator is not None:
            extra = self.generator(x[:, 0]).reshape(batch, 1, 3, inner.num_heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = (torch.cat([a, b], dim=2) for a, b in zip((q, k, v), extra))
        attention = (q @ k.transpose(-2, -1) * inner.head_dim**-0.5).softmax(dim=-1)
        out = (attention @ v).transpose(1, 2).reshape(batch, -1, width)
        return inner.proj(out[:, :tokens])


class Straightforward:
    """DCT as one would write it first."""

    def __init__(self, model: nn.Module, conditioners: dict[str, Conditioner], margin: float, freeze: bool) -> None:
        self.model, self.margin = model.eval().requires_grad_(not freeze), margin
        norms, generators = [], []
        for i, block in enumerate(model.blocks):
            block.attn = ExplicitAttention(block.attn, conditioners.get(str(i)))
            if str(i) in conditioners:
                norms += [*block.norm1.parameters(), *block.norm2.parameters()]
                generators += list(block.attn.generator.parameters())
        self.parameters = norms + generators
        for p in self.parameters:
            p.requires_grad_(True)
        groups = [{"params": norms, "lr": LR}, {"params": generators, "lr": LR_GENERATOR}]
        self.optimizer = torch.optim.SGD(groups, momentum=MOMENTUM, foreach=False)

    def __call__(self, images: Tensor) -> Tensor:
        logits = self.model(images)
        h = entropy(logits)
        reliable = h < self.margin
        h[reliable].mean().backward()
        norm = torch.stack([p.grad.norm() for p in self.parameters]).norm()
        old = []
        with torch.no_grad():
            for p in self.parameters:
                old.append(p.clone())
                p.add_(p.grad * (RHO / (norm + 1e-12)))
        self.model.zero_grad()
        h = entropy(self.model(images))[reliable]
        h[h < self.margin].mean().backward()
        with torch.no_grad():
            for p, value in zip(self.parameters, old):
                p.copy_(value)
        self.optimizer.step()
        self.model.zero_grad()
        return logits.detach()


def source(name: str) -> nn.Module:
    """Random weights with a head that is sure of some images and unsure of others."""
    torch.manual_seed(0)
    model = timm.create_model(name)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(3)
        model.head.weight.normal_(std=0.15)
    return model


def ours(name: str, margin: float) -> acclimate.Adapter:
    return acclimate.adapt(
        source(name), "dct", lr=LR, lr_generator=LR_GENERATOR, margin=margin, recovery=0.0, reference=True, guard=None
    )


def straightforward(name: str, margin: float, freeze: bool) -> Straightforward:
    """With the generators that `ours` draws."""
    adapter = ours(name, margin)
    assert isinstance(adapter.method, DCT)
    return Straightforward(source(name), dict(adapter.method.generators.items()), margin, freeze)


def forms(name: str, margin: float) -> dict[str, Callable[[], Callable[[Tensor], Tensor]]]:
    return {
        "first": lambda: straightforward(name, margin, freeze=False),
        "frozen": lambda: straightforward(name, margin, freeze=True),
        "ours": lambda: ours(name, margin),
    }


def images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 224, 224, generator=generator) * torch.linspace(0.2, 2, count)[:, None, None, None]


def margin_for(name: str, batch: Tensor, accepted: float) -> float:
    """The entropy below which the given share of the batch lies, as far from its neighbours as possible."""
    if accepted == 1:
        return math.inf
    with ours(name, 1.0).frozen() as model:
        h = entropy(model(batch)).sort().values
    k = round(accepted * len(h))
    return float(h[k - 1] + h[k]) / 2


def alternate(
    runs: dict[str, Callable[[], Tensor | None]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """Seconds of every run, taken in turns so that a busy moment of the machine hits all; and what each returned first."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    first: dict[str, Tensor] = {}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            out = run()
            seconds[name].append(time.perf_counter() - start)
            if out is not None:
                first.setdefault(name, out)
    return seconds, first


def ratio(a: list[float], b: list[float]) -> float:
    """Median of the ratios of neighbouring runs."""
    return statistics.median(x / y for x, y in zip(a, b))


def interleaved(
    models: dict[str, Callable[[Tensor], Tensor]], stream: Tensor, repeats: int
) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """The same for a stream of single images, in turns image by image."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    first: dict[str, Tensor] = {}
    for _ in range(repeats):
        runs = [
            alternate({name: functools.partial(model, image[None]) for name, model in models.items()}, 1) for image in stream
        ]
        for name in models:
            seconds[name].append(sum(taken[name][0] for taken, _ in runs))
            first.setdefault(name, torch.cat([out[name] for _, out in runs]))
    return seconds, first


def peak(name: str, which: str, batch_size: int) -> tuple[float, float]:
    """Peak memory of a process that takes one step, in MiB: all of it, and above what it held before the step."""
    command = [sys.executable, __file__, "--model", name, "--peak", which, str(batch_size)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(out[0]), float(out[1])


def print_peak(name: str, which: str, batch_size: int) -> None:
    batch = images(batch_size)
    model = forms(name, math.inf)[which]()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = memory("VmRSS")
    model(batch)
    print(memory("VmHWM"), memory("VmHWM") - before)


def memory(what: str) -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[what].split()[0]) / 1024


def products(model: nn.Module, batch_size: int) -> Callable[[], None]:
    """The matrix products of two forward and two backward passes with the frozen weights of all blocks but the last.

    Every exact form has to compute these: they bound how much faster than another one it can be.
    """
    weights = [m.weight for block in model.blocks[:-1] for m in block.modules() if isinstance(m, nn.Linear)]
    rows = batch_size * (model.patch_embed.num_patches + 1)
    inputs = {size: torch.randn(rows, size) for w in weights for size in w.shape}

    def run() -> None:
        for _ in range(2):
            for w in weights:
                torch.mm(inputs[w.shape[1]], w.t())
                torch.mm(inputs[w.shape[0]], w)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", nargs=2, metavar=("WHICH", "BATCH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    name = arguments.model
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        return print_peak(name, arguments.peak[0], int(arguments.peak[1]))

    repeats = arguments.repeats
    print(f"{name}, float32, {arguments.threads} threads, torch {torch.__version__}, {repeats} repeats\n")
    print(f"{'':34}{'first form':>12}{'frozen form':>13}{'acclimate':>12}{'ratios':>14}   logits differ by")

    def row(what: str, measured: tuple[dict[str, list[float]], dict[str, Tensor]]) -> dict[str, list[float]]:
        seconds, out = measured
        difference = max(float((out["ours"] - out[form]).abs().max()) for form in ("first", "frozen"))
        first, frozen, ours = (f"{statistics.median(seconds[form]):.2f} s" for form in ("first", "frozen", "ours"))
        ratios = " ".join(f"{ratio(seconds[form], seconds['ours']):6.2f}" for form in ("first", "frozen"))
        print(f"{what:34}{first:>12}{frozen:>13}{ours:>12}{ratios:>14}   {difference:.1e}", flush=True)
        return seconds

    sixteen = images(16)
    plain = source(name).eval().requires_grad_(False)

    def step_runs(accepted: float) -> dict[str, Callable[[], Tensor]]:
        made = {form: make() for form, make in forms(name, margin_for(name, sixteen, accepted)).items()}
        return {form: functools.partial(model, sixteen) for form, model in {**made, "plain": plain}.items()}

    half = row("step, batch 16, half reliable", alternate(step_runs(0.5), repeats))
    everything = row("step, batch 16, all reliable", alternate(step_runs(1.0), repeats))
    bound, _ = alternate({"products": products(plain, 16)}, repeats)
    least = statistics.median(bound["products"])
    limits = " ".join(f"{statistics.median(everything[form]) / least:6.2f}" for form in ("first", "frozen"))
    print(f"{'  its matrix products alone':34}{least:35.2f} s{limits:>14}   (no exact form has larger ratios)")
    eight = images(8)
    made = {form: make() for form, make in forms(name, margin_for(name, eight, 0.5)).items()}
    row("8 steps, batch 1, half accepted", interleaved(made, eight, repeats))
    del made

    peaks = {form: peak(name, form, 64) for form in ("first", "frozen", "ours")}
    for i, what in enumerate(("the whole process", "peak memory of a step, batch 64")):
        values = "".join(f"{peaks[form][i]:{width}.0f} MiB" for form, width in (("first", 8), ("frozen", 9), ("ours", 8)))
        ratios = " ".join(f"{peaks[form][i] / peaks['ours'][i]:6.1f}" for form in ("first", "frozen"))
        print(f"{what:34}{values}{ratios:>14}")

    adapter = ours(name, 1.0)
    with adapter.frozen():
        seconds, _ = alternate({"plain": lambda: plain(sixteen), "frozen": lambda: adapter(sixteen)}, 2 * repeats)
    print(f"\nfrozen() forward / plain forward, batch 16: {ratio(seconds['frozen'], seconds['plain']):.2f}")
    print(f"whole step, half reliable / plain forward, batch 16: {ratio(half['ours'], half['plain']):.2f}")


if __name__ == "__main__":
    main()
