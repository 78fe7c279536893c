"""What augments has to know how the images are normalised, and the passes over samples with more than an image."""

from __future__ import annotations

import pytest
import torch

import acclimate
from acclimate.data import bundled
from acclimate.errors import ConfigError
from acclimate.methods._augment import jitter_and_move, resized_crop
from acclimate.testing.check import tiny_batches, tiny_model
from support import EXACT, assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


def test_pixels_there_and_back():
    engine = acclimate.adapt(double_model(), "source", mean=(0.1, 0.2, 0.3), std=0.5).engine
    images = double_batches(1)[0]
    pixels = engine.to_pixels(images)
    assert_exact(pixels[:, 1], images[:, 1] * 0.5 + 0.2)
    assert_exact(engine.from_pixels(pixels), images)


def test_a_timm_model_says_it_itself():
    engine = acclimate.adapt(bundled.model(), "source").engine
    assert engine.normalisation.mean == bundled.MEAN and engine.normalisation.std == bundled.STD
    given = acclimate.adapt(bundled.model(), "source", mean=0.25, std=1).engine
    assert given.normalisation.mean == (0.25,) * 3


def test_unknown_normalisation_is_refused_before_the_model_is_touched(family):
    model = tiny_model(family).train()
    with pytest.raises(ConfigError, match=r"does not say how its images are normalised: give mean= and std="):
        acclimate.adapt(model, "cotta")
    assert model.training and all(p.requires_grad for p in model.parameters())
    with pytest.raises(ConfigError, match="mean="):
        acclimate.adapt(model, "source").engine.to_pixels(tiny_batches(1)[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mean": 0.5}, "give both"),
        ({"mean": (0.5, 0.5), "std": 1}, "one for each of the 3 channels"),
        ({"mean": 0.5, "std": (1, 0, 1)}, "above 0"),
        ({"mean": "half", "std": 1}, "one for each"),
        ({"mean": float("nan"), "std": 1}, "one for each"),
    ],
)
def test_bad_normalisation(given, message):
    with pytest.raises(ConfigError, match=message):
        acclimate.adapt(tiny_model(), "source", **given)


def test_the_normalisation_is_saved(tmp_path):
    acclimate.adapt(tiny_model(), "cotta", mean=0.4, std=(0.1, 0.2, 0.3)).save(tmp_path / "state")
    assert acclimate.load(tmp_path / "state", tiny_model()).engine.normalisation.std == (0.1, 0.2, 0.3)


@pytest.mark.parametrize("padding", ["edge", "reflect"])
@pytest.mark.parametrize("shape", [(4, 3, 32, 32), (2, 1, 28, 28), (0, 3, 32, 32)])
def test_views_stay_pixels_and_draw_alike(shape, padding):
    pixels = torch.rand(shape).double()
    rngs = [torch.Generator().manual_seed(1) for _ in range(2)]
    one, two = jitter_and_move(pixels, rngs[0], padding=padding), jitter_and_move(pixels[:1], rngs[1], padding=padding)
    assert one.shape == shape and (not len(pixels) or (one.min() >= -EXACT and one.max() <= 1 + EXACT))
    assert_exact(one[:1], two)  # the same parameters for the whole batch
    assert torch.equal(rngs[0].get_state(), rngs[1].get_state())
    if len(pixels):
        assert not torch.allclose(one, pixels, atol=0.01)
        assert resized_crop(pixels, rngs[0], least=0.1).shape == shape


def test_given_rows_travel_with_their_samples():
    """Weights per sample, in micro-batches and with few kept, are those of the whole-batch form."""
    images, weights = double_batches(1, 6)[0], torch.tensor([0.0, 2.0, 0.0, 0.5, 0.0, 0.0])
    gradients = []
    for size in (6, 4, 1):
        engine = acclimate.adapt(double_model(), "tent", micro_batch=size).engine

        def weighted(logits, w):
            return w * logits.logsumexp(-1), w > 0

        result = engine.gradient(images, weighted, extras=[weights])
        assert result.used == 2
        gradients.append(torch.cat([p.grad.flatten() for p in engine.adapted.tensors]))
    for other in gradients[1:]:
        assert_exact(other, gradients[0])


def test_a_sample_may_be_several_images():
    images = double_batches(1, 6)[0]
    engine = acclimate.adapt(double_model(), "tent").engine
    pairs = torch.stack([images, images.flip(-1)], dim=1)
    logits = engine.predict(pairs)
    assert_exact(logits[:, 1], engine.predict(images.flip(-1)))
    result = engine.gradient(pairs, lambda z: ((z[:, 0] - z[:, 1]).square().sum(-1), torch.ones(len(z), dtype=torch.bool)))
    assert result.logits.shape == (6, 2, 10) and result.used == 6


def test_standing_elsewhere_copies_nothing_and_comes_back():
    engine = acclimate.adapt(tiny_model(), "tent", lr=0.1).engine
    before = [p.detach().clone() for p in engine.adapted.tensors]
    others = [torch.zeros_like(p) for p in engine.adapted.tensors]
    places = [p.data_ptr() for p in engine.adapted.tensors]
    with pytest.raises(RuntimeError, match="inside"), engine.adapted.using(others):
        assert not any(p.any() for p in engine.adapted.tensors)
        raise RuntimeError("inside")
    assert all(torch.equal(p, b) for p, b in zip(engine.adapted.tensors, before)) and not any(o.any() for o in others)
    assert [p.data_ptr() for p in engine.adapted.tensors] == places
