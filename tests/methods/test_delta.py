"""DELTA's reweighting of classes: closed-form small cases."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.core.engine import entropy
from acclimate.errors import ConfigError
from acclimate.testing.check import tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


@pytest.mark.parametrize("entropy_weight", [False, True])
def test_steps_are_those_of_the_paper(entropy_weight):
    plain = double_model()
    norms = [p for n, p in plain.named_parameters() if "norm" in n]
    optimizer = torch.optim.SGD(norms, lr=0.01, momentum=0.9)
    model = acclimate.adapt(double_model(), "delta", lr=0.01, decay=0.5, entropy_weight=entropy_weight)
    shares = torch.full((10,), 0.1, dtype=torch.float64)
    for images in double_batches(5, size=8):
        logits = plain(images)
        h, p = entropy(logits), logits.detach().softmax(-1)
        weights = (1 / shares)[p.argmax(-1)]
        weights = weights * len(images) / weights.sum()
        certainty = (0.5 * math.log(10) - h.detach()).exp() if entropy_weight else torch.full_like(h, 2.0)
        used = certainty > 1
        loss = ((certainty if entropy_weight else 1) * weights * h)[used].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shares = 0.5 * shares + 0.5 * p.mean(0)
        assert_exact(model(images), logits)
        assert model.record.used == int(used.sum())
        assert_exact(model.record.loss, loss)
        assert_exact(model.method.shares, shares)
    for ours, theirs in zip(model.engine.adapted.tensors, norms):
        assert_exact(ours, theirs)


def test_one_sample_at_a_time_is_tent():
    delta, tent = (acclimate.adapt(double_model(), method, lr=0.01) for method in ("delta", "tent"))
    for images in double_batches(4, size=1):
        assert_exact(delta(images), tent(images))


def test_nothing_used_moves_the_shares_alone(batches):
    """Uniform predictions have an entropy of ln C, above the threshold."""
    model = double_model()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    model = acclimate.adapt(model, "delta", entropy_weight=True)
    before = [p.detach().clone() for p in model.engine.adapted.tensors]
    model(batches[0])
    assert model.record.used == 0 and model.record.loss is None
    assert all(torch.equal(p, b) for p, b in zip(model.engine.adapted.tensors, before))
    assert_exact(model.method.shares, [0.1] * 10)


def test_a_class_that_was_never_predicted_does_not_overflow(batches):
    model = acclimate.adapt(tiny_model(), "delta", guard=None)
    model(batches[0])
    rare = int(model(batches[1])[0].argmax())
    model.method.shares[rare] = 0.0
    model(batches[1])
    assert math.isfinite(model.record.loss) and all(p.isfinite().all() for p in model.engine.adapted.tensors)


def test_fewer_classes(batches):
    model = acclimate.adapt(double_model(), "delta", classes=[1, 2, 5])
    for images in batches:
        model(images)
    assert_exact(model.method.shares[:3].sum(), 1.0)
    assert model.method.shares[3:].isnan().all()


def test_learning_rate_and_bad_options(batches):
    model = acclimate.adapt(tiny_model(), "delta")
    model(batches[0])
    assert model.engine.adapted.optimizer.param_groups[0]["lr"] == pytest.approx(0.00025 * 6 / 64)
    for options in ({"decay": 1.5}, {"momentum": -1}, {"lr": -1}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            acclimate.adapt(tiny_model(), "delta", **options)
