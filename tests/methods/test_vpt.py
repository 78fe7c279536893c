"""VPT: prompts where they belong, SAR's step on them alone, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.core.engine import entropy
from acclimate.errors import ConfigError
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


def prompted(plain, images, tokens):
    """Logits with prompts put in by hand: a block that has its own replaces those before it."""
    x = plain._pos_embed(plain.patch_embed(images))
    count = 0
    for i, block in enumerate(plain.blocks):
        if i < len(tokens):
            x = torch.cat([x[:, :1], tokens[i].expand(len(x), -1, -1), x[:, 1 + count :]], dim=1)
            count = len(tokens[i])
        x = block(x)
    return plain.head(plain.norm(x)[:, 0])


@pytest.mark.parametrize("deep", [False, True])
def test_a_step_is_sars_on_the_prompts(deep):
    plain = double_model().requires_grad_(False)
    model = acclimate.adapt(double_model(), "vpt", prompts=2, deep=deep, lr=0.3, margin=1.5, recovery=0.0)
    tokens = [p.detach().clone().requires_grad_() for p in model.engine.adapted.tensors]
    assert len(tokens) == (4 if deep else 1) and {tuple(p.shape) for p in tokens} == {(2, 32)}
    optimizer = torch.optim.SGD(tokens, lr=0.3, momentum=0.9)
    for images in double_batches(2):
        logits = prompted(plain, images, tokens)
        h = entropy(logits)
        kept = h < 1.5
        gradients = torch.autograd.grad(h[kept].mean(), tokens)
        scale = 0.05 / torch.stack([g.norm() for g in gradients]).norm()
        ahead = [(p + scale * g).detach().requires_grad_() for p, g in zip(tokens, gradients)]
        h = entropy(prompted(plain, images[kept], ahead))
        loss = h[h < 1.5].mean()
        for p, gradient in zip(tokens, torch.autograd.grad(loss, ahead)):
            p.grad = gradient
        optimizer.step()
        assert_exact(model(images), logits)
        assert_exact(model.record.loss, loss)
        assert model.record.used == int((h < 1.5).sum()) > 0
    for ours, theirs in zip(model.engine.adapted.tensors, tokens):
        assert_exact(ours, theirs)


def test_prompts_begin_as_in_the_paper():
    model = acclimate.adapt(tiny_model(), "vpt", prompts=200)
    bound = math.sqrt(6 / (3 * 8**2 + 32))
    (values,) = model.engine.adapted.tensors
    assert 0.99 * bound < float(values.detach().abs().max()) <= bound and abs(float(values.detach().mean())) < 0.02 * bound
    assert list(model.engine.adapted.named) == ["method/tokens.0"]


@pytest.mark.parametrize("batch", [6, 1])
def test_the_default_learning_rate_follows_the_batch(batch):
    model = acclimate.adapt(tiny_model(), "vpt")
    model(tiny_batches(1, batch)[0])
    assert model.engine.adapted.optimizer.param_groups[0]["lr"] == pytest.approx(model.method.lr_at_64 * batch / 64)


def test_a_recovery_brings_back_the_first_prompts(batches):
    model = acclimate.adapt(tiny_model(), "vpt", lr=0.3, margin=5.0, recovery=5.0)
    before = model.engine.adapted.tensors[0].detach().clone()
    model(batches[0])
    assert model.record.event == "recovered" and torch.equal(model.engine.adapted.tensors[0].detach(), before)


def test_impossible_options_are_refused():
    for options in ({"prompts": 0}, {"prompts": 1.5}, {"lr": -1}, {"rho": -1}, {"loss": "magic"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            acclimate.adapt(tiny_model(), "vpt", **options)
    with pytest.raises(ConfigError, match="no option 'blocks'"):
        acclimate.adapt(tiny_model(), "vpt", blocks=3)
