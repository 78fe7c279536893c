"""What a step without a sample to learn from changes: by default nothing, in some released code what momentum moves."""

from __future__ import annotations

import math

import pytest
import torch

from acclimate.core.registry import find_method
from acclimate.testing.check import Case, tiny_batches

PARAMETERS = ("model/", "optimizer/", "method/predictor", "method/alpha", "method/generators", "method/tokens")
STEPS_ON = {
    "sar": {},
    "come": {"loss": "come"},
    "dct": {},
    "vpt": {},
    "spa": {"lr": 0.01},
    "poem": {"lr": 0.01, "delay": 0},
    "recap": {"lr": 0.01, "recovery": 0.0, "margin": 50.0},
}  # without a sample, with reference
STANDS_STILL = {
    "eta": {"lr": 0.01},
    "come-eta": {"lr": 0.01, "loss": "come"},
    "eata": {"lr": 0.01},
    "rdumb": {"lr": 0.01},
    "deyo": {"lr": 0.01},
    "delta": {"lr": 0.01, "entropy_weight": True},
}


def wrapped(name, options, **more):
    method = {"come": "sar", "come-eta": "eta"}.get(name, name)
    # a threshold that every sample passes, until the test rejects them
    passing = {"redundancy": 2.0} if "redundancy" in find_method(method).options() else {}
    passing |= {"margin": 2.5} if "margin" in find_method(method).options() else {}
    passing |= {"threshold": -1.0} if method == "deyo" else {}
    return Case(find_method(method), "timm", {**passing, **options}).wrap(**more)


def reject(model, monkeypatch, passes):
    """Let the passes with these numbers, counted from now on, keep no sample."""
    gradient, count = model.engine.gradient, iter(range(1000))

    def rejecting(images, objective, **how):
        if next(count) not in passes:
            return gradient(images, objective, **how)

        def nothing(*outputs):
            losses, kept = objective(*outputs)
            return losses, torch.zeros_like(kept)

        return gradient(images, nothing, **how)

    monkeypatch.setattr(model.engine, "gradient", rejecting)


def values(model):
    return {name: p.detach().clone() for name, p in model.engine.adapted.named.items()}


def momenta(model):
    state = model.engine.adapted.optimizer.state
    return {name: state[p]["momentum_buffer"].clone() for name, p in model.engine.adapted.named.items()}


def rates(model):
    names = {p: name for name, p in model.engine.adapted.named.items()}
    groups = model.engine.adapted.optimizer.param_groups
    return {names[p]: (group["lr"], group["momentum"]) for group in groups for p in group["params"]}


def drifted(model, before, buffers):
    """Return where momentum alone brings the parameters, and what is left of it."""
    how = rates(model)
    left = {name: how[name][1] * buffer for name, buffer in buffers.items()}
    after = {name: value - how[name][0] * left[name] for name, value in before.items()}
    if "method/alpha" in after:  # of SPA, whose mean square stays
        alpha = after["method/alpha"]
        after["method/alpha"] = (alpha * math.sqrt(model.method.noise) / alpha.square().mean().sqrt()).clamp(-1, 1)
    return after, left


def assert_close(ours, expected):
    assert ours.keys() == expected.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name], atol=1e-6, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_the_mean_of_nothing_has_a_gradient_of_zero():
    """What the released code relies on: the loss is NaN, and SGD steps on zeros."""
    p = torch.ones(3, requires_grad=True)
    for loss in (p[p > 2].mean(), p[p > 2].sum() / 0):
        p.grad = None
        loss.backward()
        assert loss.isnan() and p.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("empty", ["first", "second"])
@pytest.mark.parametrize("name", STEPS_ON)
def test_the_reference_moves_by_momentum(name, empty, monkeypatch):
    """Twice in a row. Of two passes, the second alone may keep nothing; SPA's two views add up, so both have to.

    POEM and ReCAP have one pass with a gradient.
    """
    model = wrapped(name, STEPS_ON[name], reference=True)
    first, *others = tiny_batches(3)
    model(first)
    assert model.record.used
    passes = range(10) if empty == "first" or name in ("spa", "poem", "recap") else range(1, 10, 2)
    reject(model, monkeypatch, passes)
    average = getattr(model.method, "average", None)
    average = None if average is None else float(average)
    for images in others:
        after, left = drifted(model, values(model), momenta(model))
        model(images)
        assert model.record.used == 0 and model.record.loss is None
        assert_close(values(model), after)
        assert_close(momenta(model), left)
        assert any(buffer.abs().max() > 0 for buffer in left.values())
    if average is not None:
        assert float(model.method.average) == average


@pytest.mark.parametrize("name", [name for name in STEPS_ON if name != "poem"])  # which bets on every sample
def test_the_reference_begins_with_an_empty_step(name, monkeypatch):
    """SGD makes a momentum of zeros then, and the next step is as a first one."""
    fresh, late = (wrapped(name, STEPS_ON[name], reference=True) for _ in range(2))
    images, others = tiny_batches(2)
    rng, before = late.engine.rng.get_state(), values(late)
    with monkeypatch.context() as patch:
        reject(late, patch, range(10))
        late(others)
    assert_close(values(late), before)
    assert all(not buffer.any() for buffer in momenta(late).values())
    late.engine.rng.set_state(rng)
    torch.testing.assert_close(late(images), fresh(images))
    assert_close(values(late), values(fresh))
    assert_close(momenta(late), momenta(fresh))


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("view", [0, 1], ids=["frequencies", "noise"])
def test_a_view_of_spa_without_a_sample_adds_nothing(view, reference, monkeypatch):
    model = wrapped("spa", {"lr": 0.01}, reference=reference)
    first, images = tiny_batches(2)
    model(first)
    reject(model, monkeypatch, [view])
    before, buffers, gradients = values(model), momenta(model), {}
    update = model.engine.adapted.update

    def noting():
        gradients.update({name: p.grad.clone() for name, p in model.engine.adapted.named.items()})
        update()

    monkeypatch.setattr(model.engine.adapted, "update", noting)
    model(images)
    assert model.record.used > 0 and math.isfinite(model.record.loss)
    assert gradients["method/alpha"].any() == (view == 0)  # the noise learns from the noisy view alone
    drift, left = drifted(model, before, buffers)
    expected = {name: left[name] + gradients[name] for name in left if name != "method/alpha"}
    assert_close({name: momenta(model)[name] for name in expected}, expected)
    if view == 1:
        assert_close({"alpha": values(model)["method/alpha"]}, {"alpha": drift["method/alpha"]})


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", STANDS_STILL)
def test_methods_whose_released_code_skips_the_step(name, reference, monkeypatch):
    model = wrapped(name, STANDS_STILL[name], reference=reference)
    first, *others = tiny_batches(3)
    model(first)
    assert model.record.used
    before = model.snapshot()
    reject(model, monkeypatch, range(10))
    for images in others:
        model(images)
        assert model.record.used == 0 and model.record.loss is None
    after = model.snapshot()
    same = [n for n in before if n.startswith(PARAMETERS) or n == "method/average"]
    assert any(n.startswith("optimizer/") for n in same)
    assert all(torch.equal(before[n].nan_to_num(-1), after[n].nan_to_num(-1)) for n in same)
    if name == "delta":  # whose shares are of all predictions
        assert not torch.equal(before["method/shares"], after["method/shares"])


@pytest.mark.parametrize("name", STEPS_ON)
def test_by_default_nothing_moves(name, monkeypatch):
    model = wrapped(name, STEPS_ON[name])
    first, *others = tiny_batches(3)
    model(first)
    before = model.snapshot()
    reject(model, monkeypatch, range(10))
    for images in others:
        model(images)
        assert model.record.used == 0 and model.record.loss is None
    after = model.snapshot()
    same = [n for n in before if n.startswith((*PARAMETERS, "method/average"))]
    assert any(n.startswith("optimizer/") for n in same)
    assert all(torch.equal(before[n].nan_to_num(-1), after[n].nan_to_num(-1)) for n in same)


def unsure(model):
    """Let the model predict every class alike."""
    with torch.no_grad():
        for p in model.engine.view.head.parameters():
            p.zero_()


@pytest.mark.parametrize(
    ("name", "options"),
    [("spa", {}), ("delta", {"entropy_weight": True}), ("eta", {}), ("deyo", {}), ("sar", {}), ("dct", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_that_is_unsure_keeps_no_sample(name, options):
    """The filters themselves: no view is less sure, no entropy is low."""
    for reference in (False, True):
        model = Case(find_method(name), "timm", {"lr": 0.01, **options}).wrap(reference=reference)
        first, images = tiny_batches(2)
        model(first)
        unsure(model)
        expected, _ = drifted(model, values(model), momenta(model))
        moves = reference and name in STEPS_ON
        expected = expected if moves else values(model)
        model(images)
        assert model.record.used == 0
        assert_close(values(model), expected)
