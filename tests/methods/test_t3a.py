"""T3A: the bank in closed form, what a frozen adapter says, and what the guard does with scores."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import acclimate
from acclimate.core import guard as guards
from acclimate.core.engine import entropy
from acclimate.errors import ConfigError, NonFiniteError
from acclimate.methods.t3a import Bank
from acclimate.models.families import view_of
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


def test_a_class_keeps_its_surest_supports():
    def of(*values):
        return torch.tensor(values, dtype=torch.float64)

    bank = Bank(torch.zeros(2, 2, 3, dtype=torch.float64), torch.full((2, 2), torch.inf, dtype=torch.float64))
    first = of([1.0, 0, 0], [0, 2, 0], [0, 0, 3])
    assert bank.add(first, torch.tensor([1, 1, 1]), of(0.5, 0.1, 0.3)) == 2
    assert torch.equal(bank.supports[1], first[[1, 2]])
    assert bank.entropies.tolist() == [[torch.inf, torch.inf], [0.1, 0.3]]
    assert bank.add(first[:1], torch.tensor([1]), of(0.9)) == 0
    # the empty class scores 0, the other the product with its mean direction
    assert_exact(bank.score(of([5.0, 1, 1])), [[0, 2 / 2**0.5]])


@pytest.mark.parametrize("reference", [False, True])
def test_growing_lists_give_the_same_scores(reference):
    """The form one would write first: lists of everything, filtered at each step."""
    batches, plain, keep = double_batches(), double_model(), 3
    head = plain.head
    with torch.no_grad():
        rows = head(head.weight)
        supports, entropies = head.weight.clone(), entropy(rows)
        labels = rows.argmax(-1) if reference else torch.arange(10)
        model = acclimate.adapt(double_model(), "t3a", supports_per_class=keep, reference=reference)
        for images in batches:
            features = plain.forward_head(plain.forward_features(images), pre_logits=True)
            logits = head(features)
            supports, labels = torch.cat([supports, features]), torch.cat([labels, logits.argmax(-1)])
            entropies = torch.cat([entropies, entropy(logits)])
            surest = entropies.argsort()
            kept = torch.cat([surest[labels[surest] == c][:keep] for c in range(10)])
            supports, labels, entropies = supports[kept], labels[kept], entropies[kept]
            prototypes = torch.stack([F.normalize(supports[labels == c], dim=-1).sum(0) for c in range(10)])
            expected = features @ F.normalize(prototypes, dim=-1).T
            assert_exact(model(images), expected)
            assert model.record.used <= len(images) and model.record.drift == 0


def test_a_frozen_adapter_scores_with_the_bank():
    batches, model = double_batches(), acclimate.adapt(double_model(), "t3a")
    with model.frozen():
        features, _ = view_of(double_model()).features(batches[0])
        expected = features @ F.normalize(double_model().head.weight, dim=-1).T  # nothing but the head's rows yet
        assert_exact(model(batches[0]), expected)
    scores = model(batches[0])
    with model.frozen():
        assert torch.equal(model(batches[0]), scores)  # its samples are in the bank
    assert_exact(model.record.entropy, entropy(scores).mean())


def test_a_subset_of_the_classes_has_a_bank_of_its_own(batches):
    model = acclimate.adapt(tiny_model(), "t3a", classes=[7, 2, 4], supports_per_class=2)
    for images in batches:
        assert model(images).shape == (6, 3)
    filled = model.method.entropies.isfinite().any(1)
    assert filled[:3].all() and not filled[3:].any()


def test_the_guard_brings_back_a_good_bank(monkeypatch):
    """Prototypes that tell no more than two classes apart, against what the model itself says, are harm."""
    monkeypatch.setattr(guards, "TRIAL", 24)
    model = acclimate.adapt(tiny_model(), "t3a", guard=acclimate.Guard(share=1.0))
    model.method.supports[0] = 1.0
    model.method.entropies.zero_()  # nothing is surer
    events = []
    for images in tiny_batches(14, seed=4):
        model(images)
        events.append(model.record.event)
    trial, alarm = [event for event in events if event]
    assert trial.startswith("on trial: it contradicts predictions of which the unadapted model is sure")
    assert alarm.startswith("resting: it contradicts predictions of which the unadapted model is sure")
    assert model.method.entropies.isinf().any()


def test_scores_that_are_not_finite_leave_the_bank_alone(batches):
    plain = tiny_model()
    with torch.no_grad():
        plain.head.bias[3] = torch.inf
    for guard in (None, "default"):
        model = acclimate.adapt(plain, "t3a", guard=guard)
        before = model.snapshot()
        if guard is None:
            with pytest.raises(NonFiniteError):
                model(batches[0])
        else:
            model(batches[0])
            assert model.record.event.startswith("skipped")
        assert torch.equal(model.method.entropies, before["method/entropies"])
        model.unwrap()


@pytest.mark.parametrize("value", [0, -1, 2.5, "all", True])
def test_impossible_sizes_are_refused(value):
    with pytest.raises(ConfigError, match="supports_per_class"):
        acclimate.adapt(tiny_model(), "t3a", supports_per_class=value)
