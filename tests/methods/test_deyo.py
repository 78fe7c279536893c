"""DeYO: the shuffle and the difference in closed form, and a whole step against the form one would write first."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.core.engine import entropy
from acclimate.core.registry import find_method
from acclimate.errors import ConfigError
from acclimate.methods.deyo import difference, shuffle
from acclimate.testing.check import Case, micro_batches_do_not_matter, tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


def test_patches_change_places_and_nothing_else():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    shuffled = shuffle(image, torch.tensor([[3, 0, 1, 2]]), 2)
    assert shuffled[0, 0].tolist() == [[10, 11, 0, 1], [14, 15, 4, 5], [2, 3, 8, 9], [6, 7, 12, 13]]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 2, 8, 12, generator=generator)
    orders = torch.rand(3, 16, generator=generator).argsort(-1)
    assert torch.equal(shuffle(shuffle(images, orders, 4), orders.argsort(-1), 4), images)


def test_an_image_that_cannot_be_cut_evenly_keeps_its_size():
    images = torch.full((2, 3, 10, 7), 0.5, dtype=torch.float64)
    shuffled = shuffle(images, torch.arange(16).flip(0).expand(2, 16), 4)
    assert_exact(shuffled, images)


def test_difference_is_what_the_predicted_class_loses():
    clean = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]], dtype=torch.float64)
    assert_exact(difference(clean, torch.tensor([[0.0, 0.0], [math.log(4), 0.0]], dtype=torch.float64)), [0.25, -0.05])


def explicit(batches, orders, margin, weight_margin, threshold, lr):
    model = double_model()
    norms = [p for n, p in model.named_parameters() if n.startswith(("blocks.0", "blocks.1", "blocks.2")) and "norm" in n]
    optimizer = torch.optim.SGD(norms, lr=lr, momentum=0.9)
    for images, order in zip(batches, orders):
        logits = model(images)
        h = entropy(logits)
        with torch.no_grad():
            plpd = difference(logits, model(shuffle(images, order, 4)))
            weight = (weight_margin - h).exp() + plpd.exp()
        kept = (h < margin) & (plpd > threshold)
        yield logits.detach(), int(kept.sum())
        if kept.any():
            optimizer.zero_grad()
            (h * weight)[kept].mean().backward()
            optimizer.step()


def test_a_step_is_the_one_of_the_paper(monkeypatch):
    batches = double_batches(4, 8)
    generator = torch.Generator().manual_seed(0)
    orders = [torch.rand(8, 16, generator=generator).argsort(-1) for _ in batches]
    stored = iter(orders)
    monkeypatch.setattr(find_method("deyo"), "orders", lambda *_: next(stored))
    model = acclimate.adapt(double_model(), "deyo", lr=0.05, margin=1.4, weight_margin=1.0, threshold=0.1)
    counts = []
    for images, (logits, count) in zip(batches, explicit(batches, orders, 1.4, 1.0, 0.1, 0.05)):
        assert_exact(model(images), logits)
        assert model.record.used == count
        counts.append(count)
    assert sum(counts) > 3 and model.record.drift > 0


def test_default_margins_count_the_classes_of_the_target():
    model = acclimate.adapt(tiny_model(), "deyo", classes=[3, 8], threshold=-1.0)
    images = tiny_batches(1, 24)[0]
    fresh = acclimate.adapt(tiny_model(), "source", classes=[3, 8])
    sure = int((entropy(fresh(images)) < 0.5 * math.log(2)).sum())
    model(images)
    assert model.record.used == sure > 0


@pytest.mark.parametrize("options", [{"margin": 0.0}, {"threshold": 1.0}])
def test_nothing_moves_when_no_sample_is_left(options, batches):
    model = acclimate.adapt(tiny_model(), "deyo", lr=0.05, threshold=-1.0)
    model(batches[0])
    before = model.snapshot()
    for name, value in options.items():
        setattr(model.method, name, value)
    model(batches[1])
    after = model.snapshot()
    assert model.record.used == 0 and model.record.loss is None
    assert all(torch.equal(before[n], after[n]) for n in before if n.startswith(("model/", "optimizer/")))


def test_without_weights_it_is_the_mean_entropy(batches):
    model = acclimate.adapt(double_model(), "deyo", margin=9.0, threshold=-1.0, entropy_weight=0.0, plpd_weight=0.0)
    logits = model(batches[0])
    assert_exact(model.record.loss, entropy(logits).mean())


def test_selected_samples_in_any_micro_batch():
    micro_batches_do_not_matter(Case(find_method("deyo"), "timm", {"lr": 0.02, "threshold": 0.0, "margin": 1.5}))


@pytest.mark.parametrize(
    "options", [{"margin": -1}, {"threshold": 2}, {"grid": 1}, {"plpd_weight": None}, {"blocks": [9]}, {"lr": -1}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "deyo", **options)
