"""Accuracy under real time, with a clock that the test sets."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.evaluation.realtime import Clock, pass_by
from acclimate.testing.check import tiny_batches, tiny_model


def test_a_clock_says_what_happens_to_each_batch():
    clock, fates = Clock(10), []
    for seconds in (0.5, 1.5, 0.4, 2.9, 0, 0, 0):  # of which each batch has one
        fates.append(clock.next(10))
        if fates[-1] != "lose":
            clock.spend(seconds)
    # free at 1.5, 3.5, 3.9, 6.9, while batches arrive at 1, 2, 3, ...
    assert fates == ["learn", "learn", "predict", "learn", "lose", "predict", "learn"]


@pytest.mark.parametrize(
    ("rate", "learned", "lost"),
    [(math.inf, 1.0, 0.0), (3.0, 1.0, 0.0), (6.0, 0.5, 0.25), (600.0, 0.25, 0.75)],
)
def test_a_late_method_skips_updates_and_then_loses_images(rate, learned, lost):
    """Each call takes 1.5 seconds, and a batch has 6 images."""
    adapter = acclimate.adapt(tiny_model(), "tent")
    times = iter(range(100))
    batches = [(images, torch.zeros(6, dtype=torch.long)) for images in tiny_batches(4)]
    accuracy, *shares = pass_by(adapter, batches, rate, now=lambda: 1.5 * next(times))
    assert shares == [learned, lost] and int(adapter.steps) == 4 * learned and 0 <= accuracy <= 1 - lost
