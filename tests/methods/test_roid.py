"""ROID and CMF: weights, losses, correction and filter in closed form, batches of one, bad input."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import acclimate
from acclimate.core.engine import entropy
from acclimate.core.registry import find_method
from acclimate.errors import ConfigError, InputError
from acclimate.methods.cmf import CMF
from acclimate.methods.roid import soft_likelihood_ratio
from acclimate.testing.check import CHECKS, Case, tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
HOW = dict(mean=0.5, std=0.5)


def test_soft_likelihood_ratio():
    p = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    expected = -(0.7 * math.log(0.7 / 0.3 + 1e-5) + 0.2 * math.log(0.25 + 1e-5) + 0.1 * math.log(1 / 9 + 1e-5))
    assert_exact(soft_likelihood_ratio(p.log()), [expected])
    sure = torch.tensor([[50.0, 0.0, 0.0]], requires_grad=True)
    loss = soft_likelihood_ratio(sure)
    assert float(loss.detach()) == pytest.approx(-0.99 * math.log(99), abs=1e-3)
    assert torch.autograd.grad(loss.sum(), sure)[0].isfinite().all()


def test_a_step_by_hand():
    """On the whole batch at once, with the view that the method drew."""
    images = double_batches()[0]
    model = acclimate.adapt(double_model(), "roid", lr=0.01, source_momentum=0.9, **HOW)
    seen, draw = [], model.method.augmented
    model.method.augmented = lambda *a: seen.append((a[1], draw(*a))) or seen[-1][1]
    logits = model(images)
    ((kept, views),) = seen

    plain = double_model()
    norms = [p for n, p in plain.named_parameters() if "norm" in n]
    source = [p.detach().clone() for p in norms]
    z = plain(images)
    p = z.softmax(-1).detach()
    diversity = 1 - F.cosine_similarity(torch.full_like(p[:1], 0.1), p)
    diversity = (diversity - diversity.min()) / (diversity.max() - diversity.min())
    h = entropy(z.detach())
    certainty = (h.max() - h) / (h.max() - h.min())
    assert torch.equal(kept, diversity >= diversity.mean())
    w = (3 * diversity * certainty).exp()[kept]
    a, b = plain(views).softmax(-1), z[kept].softmax(-1)
    consistency = -0.5 * (b * a.log() + a * b.log()).sum(-1)
    loss = (w * (soft_likelihood_ratio(z[kept]) + consistency)).sum() / len(images)
    optimizer = torch.optim.SGD(norms, lr=0.01, momentum=0.9, nesterov=True)
    loss.backward()
    optimizer.step()
    assert_exact(model.record.loss, loss)
    assert model.record.used == int(kept.sum())
    for mine, theirs, start in zip(model.engine.adapted.tensors, norms, source):
        assert_exact(mine, 0.9 * theirs + 0.1 * start)

    mean = p.mean(0)
    s = max(1 / 6, 1 / 10) / mean.max()
    prior = (mean + s) / (1 + 10 * s)
    assert_exact(prior.sum(), 1.0)
    assert_exact(logits.softmax(-1), F.normalize(p * prior, p=1, dim=-1))
    assert_exact(model.method.average, 0.9 * 0.1 + 0.1 * mean)


def test_the_reference_multiplies_the_logits():
    images = double_batches()[0]
    logits = acclimate.adapt(double_model(), "roid", reference=True, **HOW)(images)
    with torch.no_grad():
        z = double_model()(images)
    ratio = logits / z
    assert_exact(ratio, ratio[:1].expand_as(ratio))


@pytest.mark.parametrize("method", ["roid", "cmf"])
def test_the_reference_divides_by_the_size_of_the_first_batch(method, tmp_path):
    """Also in a short last one, after a restart too."""
    first, last = tiny_batches(1)[0], tiny_batches(1, 3)[0]
    default, reference = (acclimate.adapt(tiny_model(), method, lr=0.01, reference=r, **HOW) for r in (False, True))
    default(first)
    reference(first)
    assert reference.record.loss == pytest.approx(default.record.loss)
    reference.save(tmp_path / "s.safetensors")
    again = acclimate.load(tmp_path / "s.safetensors", tiny_model())
    for model in (default, reference, again):
        model(last)
    assert reference.record.loss == pytest.approx(default.record.loss * 3 / 6)
    assert again.record.loss == reference.record.loss


@pytest.mark.parametrize("method", ["roid", "cmf"])
def test_a_window_learns_from_single_images_as_from_a_batch(method):
    first, second = tiny_batches(2)
    whole = acclimate.adapt(double_model(), method, lr=0.01, **HOW)
    single = acclimate.adapt(double_model(), method, lr=0.01, window=len(first), **HOW)
    for batch in (first, second):
        expected = whole(batch)
        outputs = [single(image[None]) for image in batch]
        # the last image knows the whole window's frequencies; those before it only what came before
        assert_exact(outputs[-1], expected[-1:])
        assert single.record.used == whole.record.used > 0
        for mine, theirs in zip(single.engine.adapted.tensors, whole.engine.adapted.tensors):
            assert_exact(mine, theirs)
    assert single.record.step == 2 * len(first)


@pytest.mark.parametrize("check", ["save_load_continue", "batch_of_one", "bad_images_leave_the_state_alone"])
def test_a_window_needs_no_excuse(check):
    CHECKS[check](Case(find_method("roid"), "timm", {"window": 3}))


@pytest.mark.parametrize("method", ["roid", "cmf"])
def test_a_stream_of_single_images_is_refused(method):
    model = acclimate.adapt(tiny_model(), method, **HOW)
    before = model.state.capture()
    with pytest.raises(InputError, match=r"pass at least two at once, let it collect some \(window=16\)"):
        model(tiny_batches(1, 1)[0])
    after = model.state.capture()
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
    model(tiny_batches(1, 4)[0])  # and it can go on


def test_a_single_image_at_the_end_is_predicted():
    model = acclimate.adapt(tiny_model(), "roid", lr=0.01, **HOW)
    model(tiny_batches(1, 4)[0])
    before = [p.detach().clone() for p in model.engine.adapted.tensors]
    assert model(tiny_batches(1, 1)[0]).isfinite().all()
    assert model.record.event.startswith("skipped: a single image") and model.record.used == 0
    assert all(torch.equal(p, b) for p, b in zip(model.engine.adapted.tensors, before))


def test_equal_images(batches):
    """Nothing to tell them apart: the default learns from all alike, the reference divides 0 by 0 and skips."""
    images = batches[0][:1].repeat(4, 1, 1, 1)
    default = acclimate.adapt(tiny_model(), "roid", lr=0.01, micro_batch=4, **HOW)
    assert default(images).isfinite().all()
    reference = acclimate.adapt(tiny_model(), "roid", reference=True, micro_batch=4, **HOW)
    assert reference(images).isfinite().all()
    assert default.record.used in (4, 3, 2, 1) and default.record.drift > 0


def test_class_subset(batches):
    model = acclimate.adapt(double_model(), "roid", classes=[0, 3, 9], lr=0.01, **HOW)
    for images in batches:
        assert model(images).shape == (6, 3)
    assert_exact(model.method.average[:3].sum(), 1.0)
    assert model.method.average[3:].isnan().all()


def test_filter_by_hand(batches):
    options = dict(lr=0.02, alpha=0.9, gamma=0.8, q=3.0)
    model = acclimate.adapt(double_model(), "cmf", **options, **HOW)
    plain = acclimate.adapt(double_model(), "roid", lr=0.02, source_momentum=1, **HOW)
    count = sum(p.numel() for p in model.engine.adapted.tensors)
    q = 3.0 * count / 38_400
    model(batches[0])
    plain(batches[0])
    gain = (1 - q) / (q + 1 - q)
    assert_exact(model.method.variance, gain * q)
    for mine, hidden, updated, source in zip(
        model.engine.adapted.tensors, model.method.hidden.weights, plain.engine.adapted.tensors, model.engine.adapted.source
    ):
        expected = gain * source + (1 - gain) * updated
        assert_exact(hidden, expected)
        assert_exact(mine, 0.8 * updated + 0.2 * expected)


def test_the_gain_has_limits():
    assert (
        CMF.gain(0.0, 0.0) == 1 and CMF.gain(1e-6, 1e-6) == 1 and CMF.gain(5.0, 0.1) == 0.89 and CMF.gain(9.0, 1.0) == 0.89
    )


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("roid", {"lr": -1}),
        ("roid", {"temperature": 0}),
        ("roid", {"source_momentum": 1.5}),
        ("cmf", {"alpha": 2}),
        ("cmf", {"q": -1}),
        ("cmf", {"gamma": None}),
    ],
)
def test_bad_options(method, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), method, **options, **HOW)
