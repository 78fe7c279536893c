"""NEO: the centre of all samples so far, in both forms, and predictions around it."""

from __future__ import annotations

import pytest
import torch

import acclimate
from acclimate.errors import ConfigError
from acclimate.models.families import view_of
from acclimate.testing.check import tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
SIZES = (6, 3, 1, 6)


def stream(sizes=SIZES):
    return [images[:size] for images, size in zip(double_batches(len(sizes)), sizes)]


@torch.no_grad()
def features_of(family, images):
    return view_of(double_model(family)).features(images)[0]


def test_the_centre_is_the_mean_of_all_samples_whatever_their_batches(family):
    model, batches = acclimate.adapt(double_model(family), "neo"), stream()
    head = view_of(double_model(family)).head
    seen = features_of(family, torch.cat(batches))
    count = 0
    for images in batches:
        logits = model(images)
        start, count = count, count + len(images)
        centre = seen[:count].mean(0)
        assert_exact(model.method.centre, centre)
        assert_exact(logits, head(seen[start:count] - centre))  # the batch itself is in the centre
    assert int(model.method.count) == count == sum(SIZES) and model.record.used == SIZES[-1]


def test_the_continual_form_is_an_exponential_average_from_zero():
    model, centre = acclimate.adapt(double_model(), "neo", alpha=0.3), torch.zeros(32, dtype=torch.float64)
    for images in stream():
        logits, features = model(images), features_of("timm", images)
        centre = 0.7 * centre + 0.3 * features.mean(0)  # a small batch counts as much as a large one
        assert_exact(model.method.centre, centre)
        assert_exact(logits, tiny_head()(features - centre))


def tiny_head():
    return view_of(double_model()).head


def test_the_first_of_single_images_is_predicted_by_the_bias():
    model = acclimate.adapt(double_model(), "neo")
    first, second = stream((1, 1))
    assert_exact(model(first), tiny_head().bias[None])
    a, b = features_of("timm", first), features_of("timm", second)
    assert_exact(model(second), tiny_head()((b - a) / 2))


def test_a_frozen_model_predicts_with_the_centre_that_it_has():
    model, (first, second) = acclimate.adapt(double_model(), "neo"), stream((6, 3))
    with model.frozen():
        assert_exact(model(second), tiny_head()(features_of("timm", second)))  # no centre yet
    model(first)
    with model.frozen():
        logits = model(second)
    assert_exact(logits, tiny_head()(features_of("timm", second) - features_of("timm", first).mean(0)))
    assert int(model.method.count) == 6


def test_a_subset_of_the_classes_does_not_change_the_centre():
    some, every = (acclimate.adapt(double_model(), "neo", classes=classes) for classes in ([7, 2], None))
    for images in stream():
        assert_exact(some(images), every(images)[:, [7, 2]])
    assert_exact(some.method.centre, every.method.centre)


@pytest.mark.parametrize("alpha", [-0.1, 1.5, "much"])
def test_impossible_options_are_refused(alpha):
    with pytest.raises(ConfigError, match="alpha"):
        acclimate.adapt(tiny_model(), "neo", alpha=alpha)
