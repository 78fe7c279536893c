"""COME, as the loss of other methods: the opinion entropy, and what changes with it."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.core.registry import find_method
from acclimate.errors import ConfigError
from acclimate.methods._losses import opinion_entropy, uncertainty
from acclimate.testing.check import CHECKS, Case, tiny_batches, tiny_model
from support import EXACT, assert_exact

pytestmark = pytest.mark.numerics


def naive(logits, mass):
    """As the paper writes it; overflows for large logits."""
    logits = logits * logits.detach().norm(dim=-1, keepdim=True) / logits.norm(dim=-1, keepdim=True)
    evidence = logits.exp()
    total = evidence.sum(-1, keepdim=True) + mass
    opinion = torch.cat([evidence / total, mass / total], -1) + 1e-7
    return -(opinion * opinion.log()).sum(-1)


def test_opinion_entropy_is_the_papers():
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(0)).double() * 4
    for mass in (10, 1000):
        ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        assert_exact(opinion_entropy(ours, mass), naive(theirs, mass))
        gradients = [torch.autograd.grad(f(x, mass).sum(), x)[0] for f, x in ((opinion_entropy, ours), (naive, theirs))]
        assert_exact(*gradients)


def test_its_gradient_does_not_lengthen_the_logits():
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    (gradient,) = torch.autograd.grad(opinion_entropy(logits, 10).sum(), logits)
    assert gradient.abs().max() > 1e-3
    assert (gradient * logits).sum(-1).abs().max() < EXACT


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4])
def test_extreme_logits_stay_finite(scale):
    logits = (scale * torch.tensor([[1.0, -1.0, 0.5]])).requires_grad_()
    value = opinion_entropy(logits, 3)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.isfinite().all() and gradient.isfinite().all()


def test_closed_form():
    """Equal evidence of 1 for each of C classes against a mass of C: half of the whole is uncertainty."""
    expected = -sum(share * math.log(share) for share in (0.5 + 1e-7, *[0.125 + 1e-7] * 4))
    assert_exact(opinion_entropy(torch.zeros(1, 4, dtype=torch.float64), 4), [expected])


def test_the_mass_is_the_number_of_classes_and_1000_in_the_reference():
    logits = torch.randn(2, 3)
    for reference, mass in ((False, 3), (True, 1000)):
        engine = acclimate.adapt(tiny_model(), "tent", classes=[0, 1, 2]).engine
        assert torch.equal(uncertainty("come", engine, reference=reference)(logits), opinion_entropy(logits, mass))


@pytest.mark.parametrize("method", ["tent", "eta", "sar", "dct"])
def test_methods_learn_from_it(method):
    losses, used = [], 0
    model = acclimate.adapt(tiny_model(), method, loss="come", lr=0.01)
    images = tiny_batches(1)[0]
    for _ in range(4):
        logits = model(images)
        used += model.record.used
        losses.append(float(opinion_entropy(logits, 10).mean()))
    assert used and losses[-1] != losses[0]
    plain = acclimate.adapt(tiny_model(), method, lr=0.01)
    for _ in range(4):
        plain(images)
    assert not torch.equal(plain.engine.adapted.tensors[0], model.engine.adapted.tensors[0])
    with pytest.raises(ConfigError, match="loss='comet'"):
        acclimate.adapt(tiny_model(), method, loss="comet")


def test_tent_minimises_it():
    model = acclimate.adapt(tiny_model(), "tent", loss="come", lr=0.01)
    images = tiny_batches(1)[0]
    losses = []
    for _ in range(5):
        model(images)
        losses.append(model.record.loss)
    assert min(losses) == losses[-1] < losses[0]


@pytest.mark.parametrize("method", ["tent", "eta", "sar"])
@pytest.mark.parametrize(
    "check", ["save_load_continue", "batch_of_one", "no_reliable_sample", "micro_batches_do_not_matter"]
)
def test_methods_conform_with_it(method, check):
    CHECKS[check](Case(find_method(method), "timm", {"loss": "come"}))


def test_a_state_file_from_before_the_option_goes_on(tmp_path):
    """It can only have been written with the default."""
    model = acclimate.adapt(tiny_model(), "sar")
    model(tiny_batches(1)[0])
    model.save(tmp_path / "new.safetensors")
    tensors, header = acclimate.core.adapter.statefile.read(tmp_path / "new.safetensors")
    del header["config"]["loss"]
    acclimate.core.adapter.statefile.write(tmp_path / "old.safetensors", tensors, header)
    assert acclimate.load(tmp_path / "old.safetensors", tiny_model()).method.loss == "entropy"
