"""A whole DCT step equals the form that one would write first, for any batch, micro-batch and margin."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import acclimate
from acclimate.core.engine import entropy
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


class ExplicitAttention(nn.Module):
    """timm's attention with a generated query, key and value appended, and the appended output row dropped."""

    def __init__(self, inner, conditioner):
        super().__init__()
        self.inner = inner
        self.generator = nn.Linear(32, 96, dtype=torch.float64)
        with torch.no_grad():
            self.generator.weight.copy_(torch.cat([conditioner.weights[part] for part in "qkv"]))
            self.generator.bias.copy_(torch.cat([conditioner.biases[part] for part in "qkv"]))

    def forward(self, x, **_):
        tokens = torch.cat([self.inner.qkv(x), self.generator(x[:, :1])], 1)
        q, k, v = tokens.reshape(len(x), -1, 3, 2, 16).permute(2, 0, 3, 1, 4)
        out = (q @ k.transpose(-2, -1) / 4).softmax(-1) @ v
        return self.inner.proj(out.transpose(1, 2).reshape(len(x), -1, 32)[:, :-1])


def straightforward(conditioners, batches, margin, lr, lr_generator):
    """Whole batch, autograd on everything, two full passes per step, no step without a reliable sample."""
    model = double_model()
    for i, conditioner in conditioners.items():
        model.blocks[int(i)].attn = ExplicitAttention(model.blocks[int(i)].attn, conditioner)
    adapted = {n: p for n, p in model.named_parameters() if n.startswith(("blocks.0", "blocks.1", "blocks.2"))}
    norms = {n: p for n, p in adapted.items() if ".norm" in n}
    generators = {n: p for n, p in adapted.items() if "generator" in n}
    parameters = [*norms.values(), *generators.values()]
    optimizer = torch.optim.SGD(
        [{"params": [*norms.values()], "lr": lr}, {"params": [*generators.values()], "lr": lr_generator}], momentum=0.9
    )
    outputs = []
    for images in batches:
        model.zero_grad()
        logits = model(images)
        outputs.append(logits.detach())
        h = entropy(logits)
        reliable = h < margin
        if not reliable.any():
            continue
        h[reliable].mean().backward()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        old = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.add_(0.05 * p.grad / (norm + 1e-12))
        model.zero_grad()
        h = entropy(model(images))[reliable]
        survivors = h < margin
        if survivors.any():
            h[survivors].mean().backward()
        with torch.no_grad():
            for p, value in zip(parameters, old):
                p.copy_(value)
        if survivors.any():
            optimizer.step()
    return outputs, norms, generators


@given(
    size=st.integers(1, 7),
    micro_batch=st.sampled_from([None, 1, 2, 3, 5, 8]),
    margin=st.sampled_from([0.0, 0.55, 0.92, 1.6, math.inf]),
    seed=st.integers(0, 4),
)
def test_steps_equal_the_straightforward_form(size, micro_batch, margin, seed):
    batches = double_batches(3, size, seed)
    model = acclimate.adapt(
        double_model(), "dct", lr=0.01, lr_generator=0.02, margin=margin, recovery=0.0, micro_batch=micro_batch
    )
    conditioners = dict(model.method.generators.items())
    outputs, norms, generators = straightforward(conditioners, batches, margin, 0.01, 0.02)
    for images, expected in zip(batches, outputs):
        assert_exact(model(images), expected)
    for name, p in norms.items():
        assert_exact(model.engine.adapted.named[f"model/{name}"], p)
    for name, p in generators.items():
        conditioner = conditioners[name.split(".")[1]]
        parts = conditioner.weights if name.endswith("weight") else conditioner.biases
        assert_exact(torch.cat([parts[part] for part in "qkv"]), p)
