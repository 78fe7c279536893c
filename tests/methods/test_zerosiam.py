"""ZeroSiam: a whole step against the form one would write first, its learning rates and its options."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import acclimate
from acclimate.core.engine import entropy
from acclimate.errors import ConfigError
from acclimate.methods._siamese import divergence
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


def test_divergence_is_that_of_the_distributions():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 4, 5, generator=generator).double()
    expected = F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="none").sum(-1)
    assert_exact(divergence(p, q), expected)
    assert not divergence(p, p).any()


def test_a_step_is_the_one_of_the_paper():
    plain = double_model()
    predictor = torch.eye(32, dtype=torch.float64, requires_grad=True)
    norms = [p for n, p in plain.named_parameters() if "norm" in n]
    groups = [{"params": norms, "lr": 0.02}, {"params": [predictor], "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, momentum=0.8)
    model = acclimate.adapt(double_model(), "zerosiam", lr=0.02, lr_predictor=0.05, alignment=0.7, momentum=0.8)
    for images in double_batches():
        features = plain.forward_head(plain.forward_features(images), pre_logits=True)
        clean, other = plain.head(features).detach(), plain.head(features @ predictor.T)
        loss = (entropy(other) + 0.7 * (divergence(clean, other) + divergence(other, clean))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert_exact(model(images), clean)
        assert_exact(model.record.loss, loss)
    assert_exact(model.method.predictor, predictor)


@pytest.mark.parametrize(
    ("batch", "options", "expected"),
    [
        (64, {}, [0.005, 0.005]),
        (1, {}, [0.01 / 64, 0.01 / 64]),
        (1, {"batch_size": 64, "lr_predictor": 1.0}, [0.005, 1.0]),
        (6, {"lr": 0.1}, [0.1, 0.005 * 6 / 64]),
    ],
)
def test_learning_rates(batch, options, expected):
    optimizer = acclimate.adapt(tiny_model(), "zerosiam", **options).method.optimizer(batch)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)


def test_a_subset_of_the_classes(batches):
    model = acclimate.adapt(tiny_model(), "zerosiam", classes=[1, 4, 9])
    for images in tiny_batches(2):
        assert model(images).shape == (6, 3)
    assert model.record.used == 6 and model.record.drift > 0


@pytest.mark.parametrize(
    "options", [{"alignment": -1}, {"lr_predictor": "fast"}, {"momentum": 2}, {"batch_size": 0}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "zerosiam", **options)
