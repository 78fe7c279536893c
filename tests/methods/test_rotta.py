"""RoTTA: which samples the memory keeps, an update by hand, bad input."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import acclimate
from acclimate.errors import ConfigError, ModelError, NonFiniteError
from acclimate.methods.rotta import EMPTY
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
HOW = dict(mean=0.5, std=0.5)


def memory(size, **held):
    """A method whose memory holds samples: label, entropy, arrival."""
    method = acclimate.adapt(tiny_model(), "rotta", memory=size, **HOW).method
    for i, (label, h, arrival) in enumerate(held.values()):
        method.labels[i], method.entropies[i], method.arrivals[i] = label, h, arrival
    method.seen.fill_(10)
    return method


def test_a_free_place_is_taken_first():
    assert memory(4, a=(0, 0.5, 9), b=(1, 0.5, 8)).place_for(2, 2.0, 4) == 2


def test_a_full_class_competes_with_itself():
    """Four places for two classes: the third of class 0 replaces the worst of class 0, or nobody."""
    method = memory(4, a=(0, 0.1, 9), b=(0, 0.6, 9), c=(1, 0.69, 1))
    assert method.place_for(0, 0.2, 2) == 1
    assert method.place_for(0, 0.69, 2) is None  # less sure than both
    method.arrivals[0], method.entropies[0] = -1000, 0.4  # so old that it leaves although it is surer
    assert method.place_for(0, 0.5, 2) == 0


def test_a_new_class_takes_from_the_largest():
    method = memory(4, a=(0, 0.9, 9), b=(1, 0.2, 9), c=(1, 0.4, 9), d=(1, 0.3, 9))
    assert method.place_for(2, 0.1, 4) == 2
    assert method.place_for(2, 1.3, 4) is None


def test_score():
    method = memory(8)
    method.lambda_t, method.lambda_u = 2.0, 3.0
    ages, entropies = torch.tensor([[0.0, 8.0], [0.0, math.log(10)]], dtype=torch.float64)
    assert_exact(method.score(ages, entropies, 10), [1.0, 2 / (1 + math.exp(-1)) + 3])


def test_more_classes_than_places():
    """At most one sample per class."""
    model = acclimate.adapt(tiny_model(), "rotta", memory=4, every=100, **HOW)
    for images in tiny_batches(5):
        model(images)
    held = model.method.labels[model.method.labels != EMPTY].tolist()
    assert len(set(held)) == len(held) <= 4


def test_an_update_by_hand():
    images = double_batches()[0]
    model = acclimate.adapt(double_model(), "rotta", lr=0.01, nu=0.3, memory=60, every=6, **HOW)
    seen, draw = [], model.method.augmented
    model.method.augmented = lambda *a: seen.append((a[1], draw(*a))) or seen[-1][1]
    plain, teacher = double_model(), double_model()
    assert_exact(model(images), plain(images))
    ((places, views),) = seen
    assert places.tolist() == list(range(6))
    norms = [n for n, _ in plain.named_parameters() if "norm" in n]
    optimizer = torch.optim.Adam([plain.get_parameter(n) for n in norms], lr=0.01)
    ages = torch.arange(6, 0, -1).double() / 60
    weights = (-ages).exp() / (1 + (-ages).exp())
    loss = -(weights * (teacher(images).softmax(-1).detach() * plain(views).log_softmax(-1)).sum(-1)).mean()
    loss.backward()
    optimizer.step()
    assert_exact(model.record.loss, loss)
    assert model.record.used == 6
    for n, average in zip(norms, model.method.teacher.weights):
        start, updated = teacher.get_parameter(n), plain.get_parameter(n)
        assert_exact(model.engine.adapted.named[f"model/{n}"], updated, n)
        assert_exact(average, 0.7 * start + 0.3 * updated, n)


def test_batches_do_not_matter_between_updates(batches):
    """Updates come by samples, so images one by one make the same memory; the predictions differ after an update only."""
    whole, single = (acclimate.adapt(double_model(), "rotta", every=18, **HOW) for _ in range(2))
    for images in batches[:2]:
        assert_exact(whole(images), torch.cat([single(i[None]) for i in images]))
    assert torch.equal(whole.method.labels, single.method.labels) and torch.equal(whole.method.images, single.method.images)


def test_a_failure_after_an_update_undoes_it(batches):
    """Two updates in a batch, of which the second fails."""
    model = acclimate.adapt(tiny_model(), "rotta", every=3, guard=None, **HOW)
    learn, calls = model.method.learn, []

    def failing(engine):
        calls.append(1)
        if len(calls) == 2:
            raise NonFiniteError("made up")
        return learn(engine)

    model.method.learn = failing
    before = copy.deepcopy(dict(model.state.capture()))
    with pytest.raises(NonFiniteError):
        model(batches[0])
    after = model.state.capture()
    assert len(calls) == 2 and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_images_of_any_size_cannot_be_remembered():
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10, dynamic_img_size=True
    )
    with pytest.raises(ModelError, match="one size"):
        acclimate.adapt(model, "rotta", **HOW)


@pytest.mark.parametrize(
    "options",
    [
        {"betas": (0.9,)},
        {"betas": 0.9},
        {"betas": "ab"},
        {"betas": (0.9, 1.0)},
        {"memory": 0},
        {"every": 1.5},
        {"nu": 2},
        {"lambda_t": -1},
    ],
)
def test_bad_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "rotta", **options, **HOW)
