"""Keel: recentred features, steps of a fixed length, and an anchor."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.core.engine import entropy
from acclimate.core.parameters import global_norm
from acclimate.models.families import view_of
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


def keel(**options):
    return acclimate.adapt(double_model(), "keel", **{"margin": 1.5, "redundancy": 10.0, **options})


def moved(adapter):
    return [p.detach() - source for p, source in zip(adapter.engine.adapted.tensors, adapter.engine.adapted.source)]


def test_it_recentres_by_default():
    assert keel().recentring.form == "order"
    assert keel(recentre=False).recentring is None


@pytest.mark.parametrize("size", [6, 3, 1])
def test_a_step_has_its_length_whatever_the_gradient_is(size):
    images = double_batches(1, size)[0]
    for scale in (1.0, 100.0):
        adapter = keel(rho=0.01, anchor=0.0, recentre=False)
        with torch.no_grad():
            adapter.model.head.weight.mul_(scale)  # longer gradients, and other samples
        adapter(images)
        used, doubt = adapter.record.used, min(1.0, adapter.record.entropy / 1.5)
        length = 0.01 * float(global_norm(adapter.engine.adapted.source)) * math.sqrt(used / size) * doubt * size / 64
        assert_exact(float(global_norm(moved(adapter))), length if used else 0.0)
        assert used or scale > 1


def test_a_step_has_the_direction_of_the_weighted_entropy():
    images = double_batches(1)[0]
    adapter = keel(rho=0.01, anchor=0.0)
    adapter(images)
    model = double_model()
    view = view_of(model)
    names = [name.removeprefix("model/") for name in adapter.engine.adapted.named]
    parameters = [model.get_parameter(name) for name in names]
    features = view.features(images)[0]
    logits = (features - adapter.recentring.displacement(features, view.head.weight)) @ view.head.weight.T + view.head.bias
    h = entropy(logits)
    kept = h < 1.5
    loss = ((1.5 - h.detach()).exp() * h)[kept].mean()
    gradient = torch.autograd.grad(loss, parameters)
    step = torch.cat([m.flatten() for m in moved(adapter)])
    expected = -torch.cat([g.flatten() for g in gradient])
    assert_exact(step / step.norm(), expected / expected.norm())


def test_the_anchor_returns_a_share_of_the_way():
    adapter = keel(rho=0.0, anchor=0.5, batch_size=64)
    with torch.no_grad():
        for p in adapter.engine.adapted.tensors:
            p.add_(1.0)
    adapter(double_batches(1)[0])
    assert adapter.record.used
    for change in moved(adapter):
        assert_exact(change, torch.full_like(change, 0.5))


def test_batches_from_which_nothing_is_learned_change_no_parameter():
    adapter = acclimate.adapt(tiny_model(), "keel", margin=0.0)
    before = [p.clone() for p in adapter.engine.adapted.tensors]
    adapter(tiny_batches(1)[0])
    assert adapter.record.used == 0
    assert all(torch.equal(p, old) for p, old in zip(adapter.engine.adapted.tensors, before))
    assert float(adapter.recentring.images) == 6  # the centre still moves


def test_it_costs_no_more_passes_than_tent():
    adapter = acclimate.adapt(tiny_model(), "keel", micro_batch=6)
    for images in tiny_batches(3):
        before = adapter.engine.passes.forward, adapter.engine.passes.backward
        adapter(images)
        assert adapter.engine.passes.backward - before[1] <= 6
    assert adapter.engine.passes.forward - before[0] <= 6 + 3  # kept samples may be passed again if they are few


def test_parameters_return_to_the_source_when_the_domain_changes():
    """They do so even if no sample of the new domain is reliable."""
    adapter = keel(rho=0.0, anchor=0.0, margin=1e-9)
    with torch.no_grad():
        for p in adapter.engine.adapted.tensors:
            p.add_(1.0)
    images = double_batches(1, 64)[0]
    for _ in range(3):
        adapter(images)
    assert adapter.recentring.kept == 1.0 and not adapter.record.used
    for change in moved(adapter):
        assert_exact(change, torch.ones_like(change))
    adapter(3 - 3 * images)
    assert adapter.recentring.kept < 0.5 and not adapter.record.used
    for change in moved(adapter):
        assert_exact(change, torch.full_like(change, adapter.recentring.kept))
