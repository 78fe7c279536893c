"""RDumb: ETA between two resets, and nothing of it after one."""

from __future__ import annotations

import pytest
import torch

import acclimate
from acclimate.errors import ConfigError, NonFiniteError
from acclimate.testing.check import tiny_batches, tiny_model

OPTIONS = {"lr": 0.01, "margin": 1.5, "redundancy": 0.9}


def test_it_is_eta_that_starts_anew_after_every_period():
    model = acclimate.adapt(tiny_model(), "rdumb", period=3, **OPTIONS)
    eta = acclimate.adapt(tiny_model(), "eta", **OPTIONS)
    for t, images in enumerate(tiny_batches(8)):
        if t in (3, 6):
            eta.reset()
        assert torch.equal(model(images), eta(images))
        assert (model.record.event == "recovered") == (t in (3, 6))
        assert model.record.used == eta.record.used
        assert torch.equal(model.method.average.nan_to_num(), eta.method.average.nan_to_num())
        for ours, theirs in zip(model.engine.adapted.tensors, eta.engine.adapted.tensors):
            assert torch.equal(ours, theirs)
    assert model.record.drift > 0


def test_learning_rate_is_a_quarter_of_etas():
    model = acclimate.adapt(tiny_model(), "rdumb")
    model(tiny_batches(1, 6)[0])
    assert model.engine.adapted.optimizer.param_groups[0]["lr"] == pytest.approx(0.00025 * 6 / 64)


def test_a_step_that_fails_when_a_reset_is_due_changes_nothing():
    model = acclimate.adapt(tiny_model(), "rdumb", period=2, guard=None, **OPTIONS)
    batches = tiny_batches(3)
    for images in batches[:2]:
        model(images)
    before = model.state.capture()
    look = model.method.look

    def fail(*arguments):
        look(*arguments)
        raise NonFiniteError("on purpose")

    model.method.look = fail
    with pytest.raises(NonFiniteError):
        model(batches[2])
    assert all(torch.equal(t.nan_to_num(), before[name].nan_to_num()) for name, t in model.state.capture().items())
    model.method.look = look
    model(batches[2])
    assert model.record.event == "recovered"


@pytest.mark.parametrize("period", [0, 1.5, True, "x"])
def test_impossible_periods_are_refused(period):
    with pytest.raises(ConfigError, match="period"):
        acclimate.adapt(tiny_model(), "rdumb", period=period)
