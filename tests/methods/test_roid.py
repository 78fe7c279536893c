"""ROID and CMF: weights, losses, correction and filter in closed form, batches of one, bad input."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import acclimate
from acclimate.core.engine import entropy
from acclimate.core.registry import find
from acclimate.errors import ConfigError, InputError
from acclimate.methods.cmf import CMF
from acclimate.methods.roid import soft_likelihood_ratio
from acclimate.testing.check import CHECKS, Case, tiny_batches, tiny_vit

HOW = dict(mean=0.5, std=0.5)


def test_soft_likelihood_ratio():
    p = torch.tensor([[0.7, 0.2, 0.1]])
    expected = -(0.7 * math.log(0.7 / 0.3 + 1e-5) + 0.2 * math.log(0.25 + 1e-5) + 0.1 * math.log(1 / 9 + 1e-5))
    assert float(soft_likelihood_ratio(p.log())) == pytest.approx(expected, abs=1e-5)
    sure = torch.tensor([[50.0, 0.0, 0.0]], requires_grad=True)
    loss = soft_likelihood_ratio(sure)
    assert float(loss.detach()) == pytest.approx(-0.99 * math.log(99), abs=1e-3)
    assert torch.autograd.grad(loss.sum(), sure)[0].isfinite().all()


def test_a_step_by_hand(batches):
    """On the whole batch at once, with the view that the method drew."""
    images = batches[0]
    model = acclimate.adapt(tiny_vit(), "roid", lr=0.01, source_momentum=0.9, **HOW)
    seen, draw = [], model.method.augmented
    model.method.augmented = lambda *a: seen.append((a[1], draw(*a))) or seen[-1][1]
    logits = model(images)
    ((kept, views),) = seen

    plain = tiny_vit()
    norms = [p for n, p in plain.named_parameters() if "norm" in n]
    source = [p.detach().clone() for p in norms]
    z = plain(images)
    p = z.softmax(-1).detach()
    diversity = 1 - F.cosine_similarity(torch.full((1, 10), 0.1), p)
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
    assert model.record.loss == pytest.approx(loss.item(), abs=1e-4) and model.record.used == int(kept.sum())
    for mine, theirs, start in zip(model.engine.adapted.tensors, norms, source):
        torch.testing.assert_close(mine.detach(), 0.9 * theirs.detach() + 0.1 * start, atol=1e-5, rtol=1e-4)

    mean = p.mean(0)
    s = max(1 / 6, 1 / 10) / mean.max()
    prior = (mean + s) / (1 + 10 * s)
    assert float(prior.sum()) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(logits.softmax(-1), F.normalize(p * prior, p=1, dim=-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model.method.average, 0.9 * 0.1 + 0.1 * mean, atol=1e-5, rtol=1e-4)


def test_the_reference_multiplies_the_logits(batches):
    logits = acclimate.adapt(tiny_vit(), "roid", reference=True, **HOW)(batches[0])
    with torch.no_grad():
        z = tiny_vit()(batches[0])
    ratio = logits / z
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", ["roid", "cmf"])
def test_the_reference_divides_by_the_size_of_the_first_batch(method, tmp_path):
    """Also in a short last one, after a restart too."""
    first, last = tiny_batches(1)[0], tiny_batches(1, 3)[0]
    default, reference = (acclimate.adapt(tiny_vit(), method, lr=0.01, reference=r, **HOW) for r in (False, True))
    default(first)
    reference(first)
    assert reference.record.loss == pytest.approx(default.record.loss)
    reference.save(tmp_path / "s.safetensors")
    again = acclimate.load(tmp_path / "s.safetensors", tiny_vit())
    for model in (default, reference, again):
        model(last)
    assert reference.record.loss == pytest.approx(default.record.loss * 3 / 6)
    assert again.record.loss == reference.record.loss


@pytest.mark.parametrize("method", ["roid", "cmf"])
def test_a_window_learns_from_single_images_as_from_a_batch(method):
    first, second = tiny_batches(2)
    whole = acclimate.adapt(tiny_vit(), method, lr=0.01, **HOW)
    single = acclimate.adapt(tiny_vit(), method, lr=0.01, window=len(first), **HOW)
    for batch in (first, second):
        expected = whole(batch)
        outputs = [single(image[None]) for image in batch]
        # the last image knows the whole window's frequencies; those before it only what came before
        torch.testing.assert_close(outputs[-1], expected[-1:], atol=1e-5, rtol=1e-4)
        assert single.record.used == whole.record.used > 0
        for mine, theirs in zip(single.engine.adapted.tensors, whole.engine.adapted.tensors):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
    assert single.record.step == 2 * len(first)


@pytest.mark.parametrize("check", ["save_load_continue", "batch_of_one", "bad_images_leave_the_state_alone"])
def test_a_window_needs_no_excuse(check):
    CHECKS[check](Case(find("roid"), "timm", {"window": 3}))


@pytest.mark.parametrize("method", ["roid", "cmf"])
def test_a_stream_of_single_images_is_refused(method):
    model = acclimate.adapt(tiny_vit(), method, **HOW)
    before = model.state.capture()
    with pytest.raises(InputError, match=r"pass at least two at once, let it collect some \(window=16\)"):
        model(tiny_batches(1, 1)[0])
    after = model.state.capture()
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
    model(tiny_batches(1, 4)[0])  # and it can go on


def test_a_single_image_at_the_end_is_predicted():
    model = acclimate.adapt(tiny_vit(), "roid", lr=0.01, **HOW)
    model(tiny_batches(1, 4)[0])
    before = [p.detach().clone() for p in model.engine.adapted.tensors]
    assert model(tiny_batches(1, 1)[0]).isfinite().all()
    assert model.record.event.startswith("skipped: a single image") and model.record.used == 0
    assert all(torch.equal(p, b) for p, b in zip(model.engine.adapted.tensors, before))


def test_equal_images(batches):
    """Nothing to tell them apart: the default learns from all alike, the reference divides 0 by 0 and skips."""
    images = batches[0][:1].repeat(4, 1, 1, 1)
    default = acclimate.adapt(tiny_vit(), "roid", lr=0.01, micro_batch=4, **HOW)
    assert default(images).isfinite().all()
    reference = acclimate.adapt(tiny_vit(), "roid", reference=True, micro_batch=4, **HOW)
    assert reference(images).isfinite().all()
    assert default.record.used in (4, 3, 2, 1) and default.record.drift > 0


def test_class_subset(batches):
    model = acclimate.adapt(tiny_vit(), "roid", classes=[0, 3, 9], lr=0.01, **HOW)
    for images in batches:
        assert model(images).shape == (6, 3)
    assert model.method.average[:3].sum() == pytest.approx(1, abs=1e-5) and model.method.average[3:].isnan().all()


def test_filter_by_hand(batches):
    options = dict(lr=0.02, alpha=0.9, gamma=0.8, q=3.0)
    model = acclimate.adapt(tiny_vit(), "cmf", **options, **HOW)
    plain = acclimate.adapt(tiny_vit(), "roid", lr=0.02, source_momentum=1, **HOW)
    count = sum(p.numel() for p in model.engine.adapted.tensors)
    q = 3.0 * count / 38_400
    model(batches[0])
    plain(batches[0])
    gain = (1 - q) / (q + 1 - q)
    assert float(model.method.variance) == pytest.approx(gain * q)
    for mine, hidden, updated, source in zip(
        model.engine.adapted.tensors, model.method.hidden.weights, plain.engine.adapted.tensors, model.engine.adapted.source
    ):
        expected = gain * source + (1 - gain) * updated
        torch.testing.assert_close(hidden, expected.detach(), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(mine, 0.8 * updated + 0.2 * expected, atol=1e-6, rtol=1e-5)


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
        acclimate.adapt(tiny_vit(), method, **options, **HOW)
