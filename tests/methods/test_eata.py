"""ETA and EATA: closed-form small cases."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import acclimate
from acclimate.core.engine import entropy
from acclimate.core.statistics import source_statistics
from acclimate.errors import ConfigError
from acclimate.testing.check import tiny_batches, tiny_model
from support import EXACT, assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


MARGIN, REDUNDANCY = 1.0, 0.6


@pytest.fixture(scope="module")
def statistics():
    return made_with(tiny_model())


def made_with(model):
    return source_statistics(model, torch.cat(tiny_batches(2, seed=3)), kinds=["fisher"], batch_size=6)


@pytest.mark.parametrize("method", ["eta", "eata"])
def test_steps_are_those_of_the_paper(method):
    """Against the whole-batch form, with samples of all kinds: unreliable, redundant and learned from."""
    plain, statistics = double_model(), made_with(double_model())
    norms = {n: p for n, p in plain.named_parameters() if "norm" in n}
    anchor = {n: p.detach().clone() for n, p in norms.items()}
    optimizer = torch.optim.SGD(norms.values(), lr=0.01, momentum=0.9)
    options = {"source_statistics": statistics, "fisher_weight": 50.0} if method == "eata" else {}
    model = acclimate.adapt(double_model(), method, lr=0.01, margin=MARGIN, redundancy=REDUNDANCY, **options)
    average, redundant = None, 0
    for images in double_batches(6, size=8):
        logits = plain(images)
        h, p = entropy(logits), logits.detach().softmax(-1)
        kept = h < MARGIN
        if average is not None:
            new = F.cosine_similarity(average[None], p).abs() < REDUNDANCY
            redundant += int((kept & ~new).sum())
            kept = kept & new
        used = int(kept.sum())
        if used:
            average = p[kept].mean(0) if average is None else 0.9 * average + 0.1 * p[kept].mean(0)
            loss = ((MARGIN - h.detach()).exp() * h)[kept].mean()
            if method == "eata":
                fisher = statistics.of("fisher")
                loss = loss + 50 * sum((fisher[n] * (norms[n] - anchor[n]) ** 2).sum() for n in norms)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert_exact(model(images), logits)
        assert model.record.used == used
        assert model.record.loss == (pytest.approx(loss.item(), rel=EXACT) if used else None)
        assert_exact(model.method.average, average)
    assert redundant
    for ours, theirs in zip(model.engine.adapted.tensors, norms.values()):
        assert_exact(ours, theirs)


def test_the_anchor_holds(batches):
    drifts, statistics = {}, made_with(double_model())
    for weight in (0.0, 100.0):
        model = acclimate.adapt(
            double_model(), "eata", source_statistics=statistics, lr=0.01, margin=5.0, redundancy=2.0, fisher_weight=weight
        )
        for images in batches:
            model(images)
        drifts[weight] = model.record.drift
    assert drifts[100.0] < 0.9 * drifts[0.0]
    plain = acclimate.adapt(double_model(), "eta", lr=0.01, margin=5.0, redundancy=2.0)
    for images in batches:
        plain(images)
    assert_exact(plain.record.drift, drifts[0.0])


def test_nothing_moves_when_nothing_is_selected(batches):
    """Not even by momentum."""
    model = acclimate.adapt(tiny_model(), "eta", lr=0.02, margin=5.0, redundancy=2.0)
    model(batches[0])
    before = model.snapshot()
    model.method.redundancy = 0.0
    model(batches[1])
    after = model.state.capture()
    assert model.record.used == 0 and model.record.loss is None
    assert all(torch.equal(after[n], t) for n, t in before.items() if n.startswith(("model/", "method/", "optimizer/")))


def test_an_overflowing_anchor_changes_nothing(statistics, batches):
    model = acclimate.adapt(
        tiny_model(), "eata", source_statistics=statistics, lr=0.01, margin=5.0, redundancy=2.0, guard=None
    )
    model(batches[0])
    before = model.snapshot()
    model.method.fisher_weight = math.inf
    with pytest.raises(acclimate.errors.NonFiniteError, match="amended"):
        model(batches[1])
    after = model.state.capture()
    assert all(torch.equal(after[n], t) for n, t in before.items() if n.startswith(("model/", "method/", "optimizer/")))


def test_fewer_classes(batches):
    """The margin counts the target's classes, or as in the released code those of the head; the average has the target's."""
    classes = [1, 2, 5]
    for reference, count in ((False, 3), (True, 10)):
        model = acclimate.adapt(double_model(), "eta", classes=classes, reference=reference, redundancy=2.0)
        for images in batches:
            logits = model(images)
            assert model.record.used == int((entropy(logits) < 0.4 * math.log(count)).sum())
        assert_exact(model.method.average[:3].sum(), 1.0)
        assert model.method.average[3:].isnan().all()


@pytest.mark.parametrize(
    "options",
    [{"margin": -1}, {"redundancy": "x"}, {"decay": 1.1}, {"fisher_weight": -1}, {"lr": math.nan}, {"momentum": 2}],
)
def test_impossible_options_are_refused(options, statistics):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "eata", source_statistics=statistics, **options)
