"""MEMO: one image by hand, images independent of their batch, views by AugMix, bad input."""

from __future__ import annotations

import pytest
import torch

import acclimate
from acclimate.errors import ConfigError
from acclimate.methods import _augment
from acclimate.methods._augment import augmix
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
HOW = dict(mean=0.5, std=0.5)


def recorded_views(model):
    """What the method is going to learn from."""
    seen, draw = [], model.method.augmented
    model.method.augmented = lambda *a: seen.append(draw(*a)) or seen[-1]
    return seen


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_an_image_by_hand(micro_batch):
    images = double_batches(1, 2)[0]
    model = acclimate.adapt(double_model(), "memo", lr=1e-3, views=5, micro_batch=micro_batch, **HOW)
    views = recorded_views(model)
    logits = model(images)
    losses = []
    for i in range(2):
        plain = double_model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
        q = plain(views[i]).softmax(-1).mean(0)
        losses.append(-(q * q.log()).sum())
        losses[-1].backward()
        optimizer.step()
        assert_exact(logits[i], plain(images[i : i + 1])[0])
    assert_exact(model.record.loss, sum(losses) / 2)
    assert model.record.used == 2
    for name, p in plain.named_parameters():
        assert_exact(model.engine.adapted.named[f"model/{name}"], p, name)


def test_images_do_not_see_each_other(batches):
    """As one batch, one by one, and in another order: the same views give the same logits."""
    model = acclimate.adapt(double_model(), "memo", lr=1e-3, views=3, **HOW)
    whole = model(batches[0])
    other = acclimate.adapt(double_model(), "memo", lr=1e-3, views=3, **HOW)
    single = torch.cat([other(image[None]) for image in batches[0]])
    assert_exact(single, whole)


def test_the_leak_matters_and_is_the_reference(batches):
    out = {}
    for name, options in {
        "clean": {},
        "leak": {"leak_optimizer_state": True},
        "reference": {"reference": True},
        "clean reference": {"reference": True, "leak_optimizer_state": False},
    }.items():
        out[name] = acclimate.adapt(tiny_model(), "memo", lr=1e-2, views=3, **options, **HOW)(batches[0])
    assert torch.equal(out["leak"], out["reference"]) and torch.equal(out["clean"], out["clean reference"])
    assert torch.equal(out["leak"][0], out["clean"][0])  # before the second image nothing has leaked
    assert not torch.allclose(out["leak"][1:], out["clean"][1:], atol=1e-2)


def test_frozen_is_the_source_and_after_is_the_same(batches):
    model = acclimate.adapt(double_model(), "memo", lr=1e-2, views=3, predict="after", **HOW)
    before = acclimate.adapt(double_model(), "memo", lr=1e-2, views=3, **HOW)
    assert torch.equal(model(batches[0]), before(batches[0]))
    with model.frozen(), torch.no_grad():
        assert_exact(model(batches[1]), double_model()(batches[1].double()))


def test_more_iterations_lower_the_entropy():
    image = tiny_batches(1, 1)[0]
    losses = []
    for iterations in (1, 8):
        model = acclimate.adapt(tiny_model(), "memo", lr=1e-3, views=8, iterations=iterations, **HOW)
        model(image)
        losses.append(model.record.loss)
    assert losses[1] < losses[0]


def test_augmix_stays_near_the_image():
    rng = torch.Generator().manual_seed(0)
    image = torch.rand(3, 8, 8).repeat_interleave(4, 1).repeat_interleave(4, 2)
    views = torch.stack([augmix(image, rng) for _ in range(30)])
    assert views.shape == (30, 3, 32, 32) and views.min() >= 0 and views.max() <= 1
    assert len({round(float(v.sum()), 3) for v in views}) == 30
    again = torch.stack([augmix(image, torch.Generator().manual_seed(7)) for _ in range(2)])
    assert torch.equal(again[0], again[1])


@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_of_augmix_works(channels):
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(20, 200, (1, channels, 40, 32), generator=rng).to(torch.uint8)
    for operation in _augment.OPERATIONS:
        results = [operation(x, rng) for _ in range(5)]
        assert all(r.shape == x.shape and r.dtype == torch.uint8 for r in results)


@pytest.mark.parametrize("options", [{"lr": -1}, {"views": 0}, {"iterations": 0}, {"weight_decay": "a"}])
def test_bad_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "memo", **options, **HOW)
