"""LAME: affinities and the fixed point in closed form, and that what it returns can be used as logits."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.core.engine import entropy
from acclimate.errors import ConfigError
from acclimate.methods.lame import LAME
from acclimate.testing.check import tiny_model
from support import EXACT, assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


def on_circle(*degrees):
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], 1)


def limited(logits):
    """Return the log-probabilities of logits, limited as LAME's authors do."""
    return (logits.softmax(-1) + 1e-10).log().log_softmax(-1)


def test_nearest_neighbours_leave_out_the_sample_itself():
    points = on_circle(0.0, 1.0, 3.0, 90.0)
    expected = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0.0]], dtype=torch.float64)
    assert torch.equal(LAME(affinity="knn", neighbours=1).affinities(points), expected)
    symmetric = LAME(affinity="knn", neighbours=1, symmetric=True).affinities(points)
    assert torch.equal(symmetric, (expected + expected.T) / 2)
    everybody = LAME(affinity="knn", neighbours=9).affinities(points)
    assert torch.equal(everybody, 1 - torch.eye(4, dtype=torch.float64))
    equal = LAME(affinity="knn", neighbours=1).affinities(on_circle(5.0, 5.0, 5.0))
    assert not equal.diagonal().any() and equal.sum() == 3


def test_gaussian_affinity_has_the_bandwidth_of_the_kth_neighbour():
    points = on_circle(0.0, 60.0)  # at distance 1
    near = math.exp(-0.5)
    assert_exact(LAME(neighbours=2).affinities(points), [[1.0, near], [near, 1.0]])
    assert (LAME().affinities(on_circle(7.0, 7.0)) == 1).all()  # a bandwidth of zero


def test_the_result_is_a_fixed_point():
    generator = torch.Generator().manual_seed(0)
    logits, features = (torch.randn(8, width, generator=generator).double() for width in (5, 4))
    method = LAME(affinity="knn", symmetric=True, neighbours=2, weight=0.5)
    log_y = method.correct(logits, features)
    assert_exact(log_y.exp().sum(-1), [1.0] * 8)
    again = (
        logits.log_softmax(-1) + 0.5 * method.affinities(torch.nn.functional.normalize(features)) @ log_y.exp()
    ).softmax(-1)
    torch.testing.assert_close(log_y.exp(), again, atol=1e-4, rtol=1e-4)  # the iteration stops a little before it
    assert_exact(LAME(weight=0.0).correct(logits, features), limited(logits))


@pytest.mark.parametrize("affinity", ["knn", "rbf"])
@pytest.mark.parametrize("reference", [False, True])
def test_a_sample_on_its_own_is_predicted_by_the_source(affinity, reference):
    images = double_batches(1, 1)[0]
    with torch.no_grad():
        expected = limited(double_model()(images))
    model = acclimate.adapt(double_model(), "lame", affinity=affinity, reference=reference)
    assert_exact(model(images), expected)


def test_what_it_returns_is_good_for_logits(batches):
    """The record's entropy is that of the corrected probabilities, and a frozen adapter says the same."""
    model = acclimate.adapt(double_model(), "lame", classes=[0, 2, 4, 6])
    out = model(batches[0])
    p = out.exp()
    assert_exact(p.sum(-1), [1.0] * 6)
    assert_exact(out.softmax(-1), p)
    assert_exact(model.record.entropy, -(p * out).sum(-1).mean())
    assert model.record.event is None and float(entropy(out).max()) <= math.log(4) + EXACT
    with model.frozen():
        assert torch.equal(model(batches[0]), out)


@pytest.mark.parametrize(
    "options", [{"affinity": "linear"}, {"neighbours": 0}, {"weight": -1}, {"max_iterations": 1.5}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "lame", **options)
