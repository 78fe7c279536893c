"""Intervals cover what they should, and verdicts need images, steps and a drift."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

import acclimate
from acclimate.analysis.intervals import LEAST_IMAGES, LEAST_STEPS, Adaptation, Interval, bootstrap, paired, verdict
from acclimate.testing.check import tiny_batches, tiny_model

MANY = Adaptation(8, 0.01)
ABOVE = Interval(0.2, 0.1, 0.3, 100)


def test_the_paired_interval_is_that_of_student():
    each = np.random.default_rng(0).normal(0.3, 1, 40)
    found = paired(each)
    expected = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high)) and found.images == 40
    assert found.mean == pytest.approx(each.mean())


def test_the_bootstrap_of_a_mean_is_near_the_paired_interval():
    each = np.random.default_rng(1).normal(0.3, 1, 200)
    found, expected = bootstrap(lambda weights: weights @ each, len(each)), paired(each)
    assert found.mean == pytest.approx(expected.mean)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.03)


def test_one_image_has_no_interval():
    assert paired([1.0]).text("px") == "+1.00 px (no interval: one image)"
    assert not paired([1.0]).excludes_zero and not bootstrap(lambda weights: weights @ np.ones(1), 1).excludes_zero


def test_an_interval_in_words():
    assert Interval(0.0123, -0.001, 0.02, 50).text("points", 1, 100) == "+1.2 points (95 % interval -0.1 to +2.0)"
    assert Interval(-1e-9, -1e-9, 1e-9, 50).text("", 3) == "+0.000 (95 % interval +0.000 to +0.000)"


def test_a_verdict_needs_an_interval_above_zero():
    assert verdict(ABOVE) == "holds here"
    assert verdict(Interval(0.2, -0.1, 0.5, 100)) == "is not seen here"
    assert verdict(Interval(-0.2, -0.3, -0.1, 100)) == "is not seen here"
    assert "too few images" in verdict(ABOVE._replace(images=LEAST_IMAGES - 1))


def test_a_verdict_about_adaptation_needs_one_that_did_something():
    assert verdict(ABOVE, MANY) == "holds here"
    assert "too few images or steps" in verdict(ABOVE, MANY._replace(steps=LEAST_STEPS - 1))
    assert verdict(ABOVE, MANY._replace(drift=1e-8)) == "is not seen here"


def test_an_adaptation_is_that_of_its_adapter():
    adapter = acclimate.adapt(tiny_model(), "tent", lr=0.1)
    assert Adaptation.of(adapter) == (0, 0)
    adapter(tiny_batches(1)[0])
    assert Adaptation.of(adapter).steps == 1 and Adaptation.of(adapter).drift > 0
    assert str(Adaptation(1, 0.02)) == "1 step moved what adapts by 2 %"
