"""Differences between methods, paired by image: their intervals mean what they say."""

from __future__ import annotations

import time

import numpy as np
import pytest

from acclimate.data.domains import DomainKey
from acclimate.evaluation.paired import Difference, pack_counts, paired_difference, unpack_counts
from acclimate.evaluation.scores import Scores


def counts(right, index=None):
    right = np.asarray(right, float)
    return unpack_counts(pack_counts(right, np.arange(len(right)) if index is None else np.asarray(index), len(right)))


def test_what_is_packed_comes_back_by_image_and_half():
    packed = pack_counts(np.array([1.0, 0, 1, 1, 0]), np.array([3, 0, 3, 1, 3]), 5)
    (first_met, first_right), (second_met, second_right) = unpack_counts(packed)
    assert first_met.tolist() == [1, 0, 0, 1, 0] and first_right.tolist() == [0, 0, 0, 1, 0]
    assert second_met.tolist() == [0, 1, 0, 2, 0] and second_right.tolist() == [0, 1, 0, 1, 0]


def test_a_run_of_many_images_stays_small():
    rng = np.random.default_rng(0)
    packed = pack_counts((rng.random(8000) < 0.6).astype(float), rng.permutation(8000), 8000)
    assert len(packed) < 8000


def test_scores_know_the_images_behind_an_order():
    scores = Scores(2, [DomainKey("fog", 5), DomainKey("snow", 5)])
    right, domain, order = [1, 0, 1, 1], [1, 0, 1, 0], np.array([4, 1, 2, 0])
    scores.extend(np.array([right, right, [0.5] * 4, [0.5] * 4, domain], float))
    found = scores.by_image(order, [2, 3])
    assert unpack_counts(found[DomainKey("fog", 5)]).sum(0).tolist() == [[1, 1], [1, 0]]
    assert unpack_counts(found[DomainKey("snow", 5)]).sum(0).tolist() == [[1, 0, 1], [1, 0, 1]]


def test_the_difference_is_that_of_the_accuracies():
    rng = np.random.default_rng(0)
    mine, theirs = rng.random((2, 300)) < [[0.7], [0.6]]
    found = paired_difference([(counts(mine), counts(theirs))])
    assert found.points == pytest.approx(100 * (mine.mean() - theirs.mean()))
    d = mine.astype(float) - theirs
    assert found.interval == pytest.approx(196 * np.sqrt(d.var(ddof=1) / 300), rel=0.02)


@pytest.mark.parametrize(("differing", "beyond"), [(0, False), (1, False), (4, False), (6, True)])
def test_a_handful_of_differing_predictions_is_no_proof(differing, beyond):
    """As McNemar's exact test has it: of five in one direction p = 0.06, of six 0.03."""
    mine, theirs = np.ones(200), np.ones(200)
    theirs[:differing] = 0
    assert paired_difference([(counts(mine), counts(theirs))]).beyond_chance is beyond
    assert paired_difference([(counts(theirs), counts(mine))]).beyond_chance is beyond


@pytest.mark.parametrize("shared", [0.0, 0.8])
def test_the_interval_holds_the_truth_as_often_as_it_says(shared):
    """Five domains and two orders of the same 200 images, which are alike hard in all of them."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        easy = rng.normal(size=200) * np.sqrt(shared)
        pairs = []
        for _domain in range(5):
            mine, theirs = easy + rng.normal(size=(2, 200)) * np.sqrt(1 - shared) > [[0.0], [0.3]]
            order = rng.permutation(200)
            pairs += [(counts(mine), counts(theirs)), (counts(mine[order], order), counts(theirs[order], order))]
        found = paired_difference(pairs)
        hits += abs(found.points - 100 * (0.5 - 0.3821)) <= found.interval
    assert 0.92 <= hits / 400 <= 0.99


def test_another_order_of_the_same_images_is_no_new_evidence():
    rng = np.random.default_rng(0)
    mine, theirs = rng.random((2, 300)) < [[0.7], [0.6]]
    once = paired_difference([(counts(mine), counts(theirs))])
    orders = [rng.permutation(300) for _ in range(5)]
    many = paired_difference([(counts(mine[order], order), counts(theirs[order], order)) for order in orders])
    assert many.points == pytest.approx(once.points) and many.interval == pytest.approx(once.interval)


def test_domains_may_have_different_numbers_of_images():
    pairs = [(counts(np.ones(n)), counts(np.zeros(n))) for n in (10, 30)]
    assert paired_difference(pairs).points == 100


def test_a_difference_is_printed_with_its_sign_and_without_a_negative_zero():
    texts = [str(Difference(*each)) for each in ((1.26, 0.5), (-1.26, None), (-0.01, 0.2))]
    assert texts == ["+1.3±0.5", "-1.3", "+0.0±0.2"]
    beyond = [Difference(*each).beyond_chance for each in ((9.0, None), (-3.0, 2.9), (2.0, 2.0))]
    assert beyond == [False, True, False]


def test_many_runs_are_compared_in_seconds():
    rng = np.random.default_rng(0)
    packed = [pack_counts((rng.random(8000) < 0.6).astype(float), rng.permutation(8000), 8000) for _ in range(2)] * 30
    start = time.perf_counter()
    each = [unpack_counts(text) for text in packed]
    paired_difference(list(zip(each[::2], each[1::2])))
    assert time.perf_counter() - start < 2
