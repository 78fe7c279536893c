"""SPA: its two views in closed form, and a whole step against the form one would write first."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.errors import ConfigError
from acclimate.methods._siamese import divergence
from acclimate.methods.spa import SPA, drop, low_frequencies, mix, surer
from acclimate.testing.check import tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
GIVEN = {"mean": 0.5, "std": 0.5}


def test_each_patch_has_its_own_noise():
    images, noise = torch.ones(2, 1, 4, 4), torch.full((1, 4, 4), 3.0)
    alpha = torch.tensor([[0.0, 1.0], [0.5, -0.5]])
    mixed = mix(images, noise, alpha)
    assert mixed[1, 0].tolist() == [[1, 1, 3, 3], [1, 1, 3, 3], [1.5, 1.5, 1.5, 1.5], [1.5, 1.5, 1.5, 1.5]]


def test_a_image_without_some_of_its_low_frequencies():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 16, 20, generator=generator).double()
    top, left = low_frequencies(images.shape[-2:], 0.3)
    assert (top, left) == (2, 3)
    keep = torch.ones(2, 3, 2 * top, 2 * left, dtype=torch.bool)
    assert_exact(drop(images, keep), images)
    keep[0, 0, 0, 1] = False  # frequency (-2, -2)
    keep[1, 2, 2, 3] = False  # frequency zero: the mean
    keep[1, 1, 3, 0] = False  # below zero, where the opposite decides
    spectrum = torch.fft.fft2(images)
    spectrum[0, 0, -2, -2] = spectrum[0, 0, 2, 2] = spectrum[1, 2, 0, 0] = 0
    assert_exact(drop(images, keep), torch.fft.ifft2(spectrum).real)
    none = torch.ones(2, 3, 0, 0, dtype=torch.bool)
    assert_exact(drop(images, none), images)


def test_only_the_surer_target_teaches():
    target = torch.tensor([[3.0, 0], [1.0, 0], [0.0, 3]], dtype=torch.float64)
    view = torch.tensor([[2.0, 0], [2.0, 0], [2.0, 0]], dtype=torch.float64)
    losses, kept = surer(view, target)
    assert kept.tolist() == [True, False, True]
    assert_exact(losses, divergence(target, view))


def test_a_step_is_the_one_of_the_paper(monkeypatch):
    batches = double_batches(4, 8)
    generator = torch.Generator().manual_seed(0)
    draws = [
        (torch.randn(3, 32, 32, generator=generator), torch.rand(8, 3, 6, 6, generator=generator) > 0.2) for _ in batches
    ]
    stored = iter(draws)
    monkeypatch.setattr(SPA, "draw", lambda *_: next(stored))
    plain = double_model()
    head, norms = plain.head, [p for n, p in plain.named_parameters() if "norm" in n]
    predictor = torch.eye(32, dtype=torch.float64, requires_grad=True)
    alpha = torch.full((4, 4), math.sqrt(0.3), dtype=torch.float64, requires_grad=True)
    groups = [{"params": norms, "lr": 0.01}, {"params": [predictor], "lr": 0.03}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    ascent = torch.optim.SGD([alpha], lr=0.5, momentum=0.8, maximize=True)
    model = acclimate.adapt(
        double_model(), "spa", lr_predictor=0.03, noise=0.3, lr_noise=0.5, momentum_noise=0.8, reference=True, **GIVEN
    )
    for images, (noise, keep) in zip(batches, draws):
        target = plain(images).detach()
        loss = 0
        for view in (drop(images, keep), mix(images, noise, alpha).clamp(-1, 1)):
            logits = head(plain.forward_head(plain.forward_features(view), pre_logits=True) @ predictor.T)
            losses, kept = surer(logits, target)
            loss = loss + losses[kept].mean()
        for optim in (optimizer, ascent):
            optim.zero_grad()
        loss.backward()
        for optim in (optimizer, ascent):
            optim.step()
        with torch.no_grad():
            alpha.mul_(math.sqrt(0.3) / alpha.square().mean().sqrt()).clamp_(-1, 1)
        assert_exact(model(images), target)
        assert_exact(model.record.loss, loss)
    assert_exact(model.method.alpha, alpha)


def test_noisy_views_stay_within_what_pixels_can_be():
    model = acclimate.adapt(double_model(), "spa", mean=[0.2, 0.3, 0.4], std=[0.1, 0.2, 0.5])
    clipped = model.method.clip(torch.full((1, 3, 1, 1), 9.0, dtype=torch.float64), model.engine)
    assert_exact(clipped.flatten(), [8.0, 3.5, 1.2])
    model.unwrap()
    reference = acclimate.adapt(tiny_model(), "spa", mean=0.2, std=0.1, reference=True)
    assert reference.method.clip(torch.full((1, 3, 1, 1), 9.0), reference.engine).max() == 1


def test_views_that_are_as_sure_teach_nothing(batches):
    """Without noise and with every frequency, view and target are equal."""
    model = acclimate.adapt(double_model(), "spa", noise=0.0, dropped_frequencies=0.0, low_frequencies=0.0, lr=0.5, **GIVEN)
    before = model.snapshot()
    model(batches[0].clamp(-1, 1))
    after = model.snapshot()
    for name in model.engine.adapted.named:
        assert_exact(after[name], before[name], name)
    assert model.method.alpha.isfinite().all()


@pytest.mark.parametrize(
    "options", [{"noise": 1.5}, {"dropped_frequencies": -1}, {"low_frequencies": 2}, {"lr": None}, {"lr_noise": -1}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "spa", **GIVEN, **options)
