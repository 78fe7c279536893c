"""MoETTA: norms with experts, a whole run against the form one would write first, its threshold, and what it gives back."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import acclimate
from acclimate.core.engine import entropy
from acclimate.errors import ConfigError, ModelError
from acclimate.methods.moetta import MoETTA
from acclimate.testing.check import tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


class ExpertNorm(nn.Module):
    """A norm with experts, in the form one would write first."""

    def __init__(self, norm, scale, shift, weight, bias):
        super().__init__()
        self.norm = norm
        values = (t.detach().clone() for t in (scale, shift, weight, bias))
        self.scale, self.shift, self.weight, self.bias = (nn.Parameter(t) for t in values)

    def forward(self, x):
        self.routes = (x.mean(1) @ self.weight.T + self.bias).softmax(-1)
        top, expert = self.routes.max(-1)
        s = (top / top.detach())[:, None]
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
        scale, shift = self.norm.weight + s * self.scale[expert], self.norm.bias + s * self.shift[expert]
        return normed * scale[:, None] + shift[:, None]


def naive(method):
    """Return a plain model with the experts of a method, and its layers with experts."""
    model, layers = double_model().requires_grad_(False), iter(method.layers)
    norms = [(block, name) for block in model.blocks for name in ("norm1", "norm2")] + [(model, "norm")]
    for holder, name in norms[1:]:
        layer = next(layers)
        parts = (layer.scale, layer.shift, layer.router.weight, layer.router.bias)
        setattr(holder, name, ExpertNorm(getattr(holder, name), *parts))
    return model, [getattr(holder, name) for holder, name in norms[1:]]


def fill(model, amount=0.3):
    """Let the experts differ, so that the choice of the routers matters."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in model.method.layers:
            for p in (layer.scale, layer.shift):
                p.copy_(amount * torch.randn(p.shape, generator=generator))


def test_the_initial_model_is_the_source_model(family):
    model, images = acclimate.adapt(double_model(family), "moetta"), double_batches(1)[0]
    with torch.no_grad():
        expected = double_model(family)(images)
    assert_exact(model(images), getattr(expected, "logits", expected))
    assert len(model.method.layers) == 2 * 4 + 1 - 1
    assert sum(p.numel() for p in model.method.layers[0].parameters()) == 2 * 9 * 32 + 9 * 32 + 9


@pytest.mark.parametrize("zero", [False, True], ids=["experts", "zero"])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("size", [6, 1])
def test_a_run_is_the_one_of_the_paper(size, reference, zero):
    lr, balance, margin = 0.02, 0.3, 1.0
    model = acclimate.adapt(
        double_model(), "moetta", lr=lr, balance=balance, margin=margin, experts=3, reference=reference, micro_batch=4
    )
    if not zero:
        fill(model)
    plain, layers = naive(model.method)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters() if p.requires_grad], lr, momentum=0.9)
    means, threshold, counts = [], None, []
    for images in double_batches(6, size=size):
        logits = plain(images)
        h = entropy(logits)
        mean = float(h.detach().mean())
        if threshold is None:
            threshold, means = mean, [mean]
        else:
            ratio = (sum([*means, mean]) / (len(means) + 1)) / (sum(means) / len(means))
            threshold *= ratio
            means.append(mean)
            if reference:
                means[0] = threshold
        kept = h.detach() <= threshold
        counts.append(int(kept.sum()))
        loss = 0 * h.sum()  # a gradient of zero, not none, without a kept sample: momentum still moves the experts
        for layer in layers:
            fraction = F.one_hot(layer.routes.argmax(-1), 3).double().mean(0)
            loss = loss + balance * threshold * 3 * (layer.routes.mean(0) * fraction).sum()
        if counts[-1]:
            loss = loss + ((margin - h.detach()).exp() * h)[kept].mean()
        assert_exact(model(images), logits)
        assert_exact(model.record.loss, loss)
        assert_exact(model.method.threshold, threshold)
        assert model.record.used == counts[-1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert counts[0] > 0 and (size > 1 or 0 in counts)  # the first one alone is its own threshold
    for ours, theirs in zip(model.method.layers, layers):
        assert_exact(ours.scale, theirs.scale)
        assert_exact(ours.shift, theirs.shift)
        assert_exact(ours.router.weight, theirs.weight)
        assert_exact(ours.router.bias, theirs.bias)


def test_without_a_kept_sample_the_routers_are_still_balanced(monkeypatch):
    model = acclimate.adapt(double_model(), "moetta", lr=0.02)
    monkeypatch.setattr(MoETTA, "follow", lambda self, mean: (1e-6, mean))
    model(double_batches(1)[0])
    assert model.record.used == 0 and math.isfinite(model.record.loss)
    *others, last = model.method.layers
    assert not last.scale.any() and not last.shift.any()  # no router depends on these experts
    assert any(layer.scale.any() for layer in others) and model.record.drift > 0


def test_the_threshold_is_the_mean_entropy_and_in_the_released_code_it_is_not():
    plain, quirk = MoETTA(), MoETTA(reference=True)
    expected, first, rest = None, None, []
    for mean in (1.0, 3.0, 2.0, 0.5):
        for method in (plain, quirk):
            threshold, total = method.follow(mean)
            method.threshold.fill_(threshold), method.total.fill_(total)
            method.count += 1
        if first is None:
            expected = first = mean
        else:
            values = [first, *rest]
            expected *= (sum(values) + mean) / (len(values) + 1) / (sum(values) / len(values))
            first = expected
            rest.append(mean)
        assert float(quirk.threshold) == pytest.approx(expected)
    assert float(plain.threshold) == pytest.approx(6.5 / 4)
    assert abs(float(quirk.threshold) - 6.5 / 4) > 0.01


def test_certain_batches_leave_a_threshold_of_zero():
    for reference in (False, True):
        method = MoETTA(reference=reference)
        for _ in range(3):
            threshold, total = method.follow(0.0)
            method.threshold.fill_(threshold), method.total.fill_(total)
            method.count += 1
        assert float(method.threshold) == 0


def test_norms_come_back(family):
    model = tiny_model(family)
    before = [(name, id(module)) for name, module in model.named_modules()]
    adapter = acclimate.adapt(model, "moetta", plain_norms=3)
    assert len(adapter.method.layers) == 6
    adapter(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    view = adapter.engine.view
    adapter.unwrap()
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    assert all(any(block.norm2 is module for module in model.modules()) for block in view.blocks)


@pytest.mark.parametrize(
    "options", [{"experts": 0}, {"balance": -1}, {"momentum": 2}, {"plain_norms": -1}, {"margin": "low"}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "moetta", **options)


def test_a_model_without_enough_norms_is_refused():
    with pytest.raises(ModelError, match="9 LayerNorms"):
        acclimate.adapt(tiny_model(), "moetta", plain_norms=9)
