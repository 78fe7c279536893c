"""Models whose weights are bfloat16 or float16: every method adapts them, or says when it wraps them that it cannot."""

from __future__ import annotations

import pytest
import torch

import acclimate
from acclimate.core.registry import find_method
from acclimate.errors import ConfigError, ModelError
from acclimate.testing.check import Case, tiny_batches, tiny_model
from support import vit_methods

HALVES = [torch.bfloat16, torch.float16]
ADAM = ("memo", "rem", "rotta")


def half_of(family, dtype):
    model = tiny_model(family).to(dtype)
    return model, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("reference", [False, True], ids=["default", "reference"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", vit_methods())
def test_steps_on_a_model_in_half_precision(name, dtype, reference):
    model, source = half_of("timm", dtype)
    case = Case(find_method(name), "timm", {"reference": reference})
    if dtype is torch.float16 and name in ADAM:
        with pytest.raises(ModelError, match="squared gradients, which are too small for weights in float16"):
            case.wrap(model)
    else:
        adapter = case.wrap(model)
        for images in tiny_batches(3):
            logits = adapter(images)
            assert logits.dtype is torch.float32 and logits.isfinite().all()
            assert adapter.record.event is None
        with adapter.frozen():
            assert adapter(tiny_batches(1)[0]).isfinite().all()
        changed = [not torch.equal(p, s) for p, s in zip(adapter.engine.adapted.tensors, adapter.engine.adapted.source)]
        assert any(changed) or not changed
        assert adapter.unwrap() is model
    assert all(torch.equal(tensor, source[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["spa", "zerosiam", "dct", "vpt"])
def test_families_in_half_precision(name, dtype, family):
    model, source = half_of(family, dtype)
    adapter = Case(find_method(name), family).wrap(model)
    assert adapter(tiny_batches(1)[0]).isfinite().all() and adapter.record.event in (None, "recovered")
    adapter.unwrap()
    assert all(torch.equal(tensor, source[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cotta", {"threshold": 0.99, "views": 2}),
        ("deyo", {"grid": 5, "threshold": -1.0, "margin": 3.0}),
        ("roid", {"window": 2}),
        ("tent", {"loss": "come", "predict": "after"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_ways_through_a_method_in_half_precision(name, options, dtype):
    adapter = Case(find_method(name), "timm", options).wrap(tiny_model().to(dtype))
    used = 0
    for images in tiny_batches(3, 1 if "window" in options else 6):
        assert adapter(images).isfinite().all() and adapter.record.event is None
        used += adapter.record.used
    assert used


def step_of(model):
    adapted = model.engine.adapted
    return torch.cat([(p.detach() - source).float().flatten() for p, source in zip(adapted.tensors, adapted.source)])


@pytest.mark.parametrize("name", ["spa", "zerosiam"])
def test_a_step_in_bfloat16_resembles_that_in_float32(name):
    """The first prediction, and which way the first step goes."""
    images = tiny_batches(1)[0]
    plain, half = (
        Case(find_method(name), "timm", {"lr": 0.01}).wrap(model)
        for model in (tiny_model(), tiny_model().to(torch.bfloat16))
    )
    torch.testing.assert_close(half(images), plain(images), atol=0.3, rtol=0.1)
    assert float(torch.cosine_similarity(step_of(plain), step_of(half), dim=0)) > 0.7


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "float16"), (torch.float16, "bfloat16")])
def test_two_half_precisions_are_not_mixed(dtype, precision):
    model, source = half_of("timm", dtype)
    with pytest.raises(ConfigError, match=f"precision='{precision}': the weights of this model are {dtype}"):
        acclimate.adapt(model, "tent", precision=precision)
    assert all(torch.equal(tensor, source[name]) for name, tensor in model.state_dict().items())
