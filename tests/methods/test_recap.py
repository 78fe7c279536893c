"""ReCAP: regional entropy and instability, a run of each variant against the form one would write first, and recovery."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.core.engine import entropy
from acclimate.core.statistics import source_statistics
from acclimate.errors import ConfigError
from acclimate.methods.deyo import difference, shuffle
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
IMAGES = torch.cat(tiny_batches(2, seed=3))
TAU, LAMBDA = 0.02, 0.5  # the rows of the tiny model's head are long, and the authors' region would contain all classes


@pytest.fixture(scope="module")
def statistics():
    return source_statistics(double_model(), IMAGES, kinds=["class_tokens"])


def wrapped(statistics, model=None, **options):
    options = {"lr": 0.02, "tau": TAU, **options}
    return acclimate.adapt(model or double_model(), "recap", source_statistics=statistics, **options)


def naive(logits, rows, variance, tau=TAU):
    """Return regional entropy and instability of each sample, by sums over pairs of classes."""
    p, q = logits.softmax(-1), (logits + 0.0005 * (rows**2).sum(1)).softmax(-1)
    pairs = ((tau / 0.1) * variance * (rows[:, None] - rows[None]) ** 2).sum(-1)
    a = ((pairs / 2).exp() * p[:, None, :]).sum(-1)
    return (q * (a.log() - p.log())).sum(-1), (p * a.log()).sum(-1)


def variance_of(statistics):
    return statistics.of("class_tokens")["std"][-32:].double() ** 2


def regional(model, logits):
    return model.method.regional(logits, model.method.region[0].exp())


def test_regional_entropy_and_instability_are_sums_over_pairs(statistics):
    model = wrapped(statistics)
    logits = 3 * torch.randn(7, 10, generator=torch.Generator().manual_seed(0)).double()
    rows = double_model().head.weight.detach()
    for ours, expected in zip(regional(model, logits), naive(logits, rows, variance_of(statistics))):
        assert_exact(ours, expected)
    h, instability = regional(model, logits)
    assert (h > entropy(logits) - 0.1).all() and (instability >= 0).all()


def test_a_region_without_extent_is_the_sample(statistics):
    """Then A is 1 everywhere: no instability, and the cross-entropy with the shifted prediction."""
    model = wrapped(statistics, tau=0.0)
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0)).double()
    h, instability = regional(model, logits)
    assert_exact(instability, torch.zeros(3))
    shift = 0.0005 * double_model().head.weight.square().sum(1)
    assert_exact(h, -((logits + shift).softmax(-1) * logits.log_softmax(-1)).sum(-1))


def test_a_large_region_stays_finite(statistics):
    model = acclimate.adapt(tiny_model(), "recap", source_statistics=single_statistics(), tau=1e4)
    for images in tiny_batches(3):
        assert model(images).isfinite().all() and model.record.event is None


def single_statistics():
    return source_statistics(tiny_model(), IMAGES, kinds=["class_tokens"])


def test_a_subset_of_the_classes_has_its_own_distances(statistics):
    classes = [7, 0, 4]
    model = wrapped(statistics, classes=classes)
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    rows = double_model().head.weight.detach()[classes]
    for ours, expected in zip(regional(model, logits), naive(logits, rows, variance_of(statistics))):
        assert_exact(ours, expected)
    assert model(double_batches(1)[0]).shape == (6, 3)


@pytest.mark.parametrize("variant", ["plain", "plpd", "tent"])
def test_a_run_is_the_one_of_the_paper(statistics, variant, monkeypatch):
    margin, weight_margin, most = 2.0, 1.5, 1.2
    plain = double_model()
    norms = [p for block in plain.blocks[:3] for n, p in block.named_parameters() if "norm" in n]
    optimizer = torch.optim.SGD(norms, lr=0.02, momentum=0.9)
    options = {"margin": margin, "weight_margin": weight_margin, "max_weight": most, "recovery": 0.0, "threshold": 0.05}
    model = wrapped(statistics, variant=variant, **options)
    orders = torch.rand(6, 16, generator=torch.Generator().manual_seed(1)).argsort(-1)
    monkeypatch.setattr(model.method, "orders", lambda images, engine: orders)
    counts = []
    for images in double_batches():
        logits = plain(images)
        h, instability = naive(logits, plain.head.weight.detach(), variance_of(statistics))
        losses, kept = h + LAMBDA * instability, torch.ones(6, dtype=torch.bool)
        if variant != "tent":
            kept = h < margin
            losses = (weight_margin - h).exp().clamp(max=most).detach() * losses
        if variant == "plpd":
            with torch.no_grad():
                kept = kept & (difference(logits, plain(shuffle(images, orders, 4))) > 0.05)
        assert_exact(model(images), logits)
        counts.append(int(kept.sum()))
        assert model.record.used == counts[-1]
        if counts[-1]:
            loss = losses[kept].mean()
            assert_exact(model.record.loss, loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert len(set(counts)) > 1 or variant == "tent"
    for ours, theirs in zip(model.engine.adapted.tensors, norms):
        assert_exact(ours, theirs)


@pytest.mark.parametrize("reference", [False, True])
def test_a_recovery_clears_the_momentum_and_by_default_the_average(statistics, reference):
    model = wrapped(statistics, reference=reference, variant="tent", recovery=1e6)
    first, second = double_batches(2)
    model(first)
    assert model.record.event == "recovered" and model.record.drift == 0 and not model.engine.adapted.optimizer.state
    half = model.record.loss / 2
    assert model.record.recovery == pytest.approx(half)
    model(second)
    again = model.record.loss / 2
    assert model.record.recovery == pytest.approx(0.9 * half + 0.1 * again if reference else again)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("variant", ["plain", "plpd"])
def test_a_batch_without_a_sample_that_counts(statistics, variant, reference):
    model = wrapped(statistics, variant=variant, reference=reference, margin=50.0, threshold=-1.0, recovery=0.0)
    first, second = double_batches(2)
    model(first)
    assert model.record.used == 6
    before = [p.detach().clone() for p in model.engine.adapted.tensors]
    buffers = [model.engine.adapted.optimizer.state[p]["momentum_buffer"].clone() for p in model.engine.adapted.tensors]
    average = float(model.method.average)
    model.method.margin = 0.0
    model(second)
    assert model.record.used == 0 and model.record.loss is None and float(model.method.average) == average
    for p, value, buffer in zip(model.engine.adapted.tensors, before, buffers):
        assert_exact(p, value - 0.02 * 0.9 * buffer if reference else value)


@pytest.mark.parametrize(("batch", "options", "lr"), [(6, {}, 0.001 * 6 / 64), (1, {}, 0.002 / 64), (6, {"lr": 0.3}, 0.3)])
def test_learning_rates(statistics, batch, options, lr):
    model = acclimate.adapt(double_model(), "recap", source_statistics=statistics, **options)
    assert model.method.optimizer(batch).param_groups[0]["lr"] == pytest.approx(lr)


def test_a_single_image_may_weigh_more(statistics):
    """With a large margin every weight is the largest, which is 5 for a batch of 1 and 1.5 otherwise."""
    losses = []
    for weight in (None, 1.0):
        for count in (1, 6):
            model = wrapped(statistics, margin=90.0, weight_margin=90.0, max_weight=weight)
            model(double_batches(1)[0][:count])
            losses.append(model.record.loss)
    assert losses[0] == pytest.approx(5 * losses[2]) and losses[1] == pytest.approx(1.5 * losses[3])
    assert math.isfinite(losses[0])


@pytest.mark.parametrize(
    "options", [{"variant": "sar"}, {"tau": -1}, {"max_weight": -1}, {"threshold": 2}, {"grid": 1}, {"decay": 2}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "recap", **options)
