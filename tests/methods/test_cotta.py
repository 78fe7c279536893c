"""CoTTA: its step in closed form, the restored weights, the views, and bad input."""

from __future__ import annotations

import copy

import pytest
import torch

import acclimate
from acclimate.errors import ConfigError
from acclimate.methods.cotta import bernoulli_positions
from acclimate.testing.check import tiny_batches, tiny_model
from support import EXACT, assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
HOW = dict(mean=0.5, std=0.5)


def test_two_steps_by_hand():
    """Teacher, student and their average, with whole copies of the model."""
    batches, student = double_batches(), double_model()
    teacher = copy.deepcopy(student)
    names = [n for n, _ in student.named_parameters() if n.endswith((".weight", ".bias"))]
    optimizer = torch.optim.SGD([student.get_parameter(n) for n in names], lr=0.01, momentum=0.9)
    model = acclimate.adapt(double_model(), "cotta", lr=0.01, teacher_momentum=0.8, restore=0, **HOW)
    assert {n.removeprefix("model/") for n in model.engine.adapted.named} == set(names)
    for images in batches[:2]:
        p, q = student(images).softmax(-1), teacher(images).softmax(-1).detach()
        loss = -0.5 * (q * p.log() + p * q.log()).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        expected = teacher(images).detach()
        optimizer.step()
        with torch.no_grad():
            for n in names:
                teacher.get_parameter(n).mul_(0.8).add_(student.get_parameter(n), alpha=0.2)
        assert_exact(model(images), expected)
        assert_exact(model.record.loss, loss)
    with model.frozen(), torch.no_grad():  # predicts as the teacher does
        assert_exact(model(batches[2]), teacher(batches[2]))


def test_views_are_averaged_where_the_source_is_unsure(batches):
    model = acclimate.adapt(double_model(), "cotta", threshold=1, views=3, **HOW)
    seen = []
    draw = model.method.view
    model.method.view = lambda *a: seen.append(draw(*a)) or seen[-1]
    logits = model(batches[0])
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1])
    with torch.no_grad():
        expected = torch.stack([double_model()(view) for view in seen]).mean(0)
    assert_exact(logits, expected)
    for view in seen:  # of pixels from 0 to 1
        assert view.min() >= -1 - EXACT and view.max() <= 1 + EXACT


def test_predict_after_is_the_teacher_after_the_update(batches):
    options = dict(lr=0.05, teacher_momentum=0.5, restore=0, **HOW)
    before = acclimate.adapt(tiny_model(), "cotta", **options)
    after = acclimate.adapt(tiny_model(), "cotta", predict="after", **options)
    before(batches[0])
    with before.frozen():
        assert torch.equal(after(batches[0]), before(batches[0]))


def test_everything_restored_is_the_source(batches):
    model = acclimate.adapt(tiny_model(), "cotta", lr=0.1, restore=1, **HOW)
    model(batches[0])
    assert model.record.drift == 0
    assert any(not torch.equal(w, s) for w, s in zip(model.method.teacher.weights, model.engine.adapted.source))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.7, 1.0])
def test_restored_positions_are_a_bernoulli_draw(share):
    rng = torch.Generator().manual_seed(0)
    count = 20_000
    positions = bernoulli_positions(count, share, rng)
    assert torch.equal(positions, positions.unique()) and (not len(positions) or 0 <= positions[0] <= positions[-1] < count)
    assert abs(len(positions) - share * count) <= 4 * (share * (1 - share) * count) ** 0.5
    firsts = torch.tensor([float(0 in bernoulli_positions(3, share, rng)) for _ in range(300)])
    assert abs(float(firsts.mean()) - share) < 0.12


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1},
        {"nesterov": True, "momentum": 0},
        {"views": 0},
        {"views": 1.5},
        {"restore": 2},
        {"threshold": "low"},
        {"teacher_momentum": 1.1},
    ],
)
def test_bad_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "cotta", **options, **HOW)


def test_class_subset_and_single_image():
    model = acclimate.adapt(tiny_model(), "cotta", classes=[1, 4, 7], threshold=0.99, views=2, **HOW)
    for images in tiny_batches(3, 1):
        assert model(images).shape == (1, 3)
