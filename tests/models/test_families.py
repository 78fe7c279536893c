"""One tiny model of every family adapts, continues from a file, and is given back as it was; docs/models.md says so."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import acclimate
from acclimate.core.registry import find_method, fitting_methods
from acclimate.core.statistics import KINDS
from acclimate.errors import ModelError
from acclimate.models.families import view_of
from acclimate.testing.check import assert_identical
from acclimate.testing.zoo import ZOO, tiny

METHODS = ("source", "lame", "norm", "t3a", "tent", "sar", "keel", "dct")  # of every combination of parts, one at least
if os.environ.get("ACCLIMATE_FAMILIES") == "all":  # as in .ci/run
    METHODS = tuple(acclimate.list_methods())
ROOT = Path(__file__).parents[2]
SLOW = ("poem", "rotta", "memo", "adacontrast")  # that wait for more samples, or return to the source
CONTINUED = ("keel", "tent")  # of which the first that suits is saved and loaded


def batches(name, count=2):
    generator = torch.Generator().manual_seed(3)
    side = ZOO[name].size
    return [torch.randn(4, 3, side, side, generator=generator) for _ in range(count)]


def logits(model, images):
    with torch.no_grad():
        out = model(images)
    return getattr(out, "logits", out)


@pytest.fixture(params=list(ZOO))
def name(request):
    if not ZOO[request.param].is_installed:
        pytest.skip(f"{ZOO[request.param].library} is not installed")
    return request.param


def options_of(kind, name):
    """Return options with which a method learns from every sample."""
    options = {"mean": 0.5, "std": 0.5, **kind.info.quick}
    options |= {"margin": 9.0} if "margin" in kind.options() else {}
    options |= {"threshold": -1.0} if kind.name == "deyo" else {}
    kinds = [each for each in kind.info.needs if not KINDS[each].learned]
    if kinds:
        options["source_statistics"] = acclimate.source_statistics(tiny(name), batches(name)[0], kinds=kinds, batch_size=4)
    return options


def test_a_family_adapts_and_is_given_back(name, tmp_path):
    model = tiny(name)
    fitting = fitting_methods(view_of(model))
    source = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    modules, expected = dict(model.named_modules()), logits(model, batches(name)[0])
    continued = next(method for method in CONTINUED if method in fitting)
    for method in METHODS:
        if method not in fitting:
            with pytest.raises(
                ModelError, match=rf"{method} needs .*, which .* lacks. Methods that suit this model: source"
            ):
                acclimate.adapt(model, method)
            continue
        kind = find_method(method)
        adapter = acclimate.adapt(model, kind, **options_of(kind, name))
        before = adapter.state.capture()
        for i, images in enumerate(batches(name)):
            out = adapter(images)
            assert out.shape == (4, 10) and out.isfinite().all() and adapter.record.event in (None, "recovered")
            if method == "source" and i == 0:
                torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert adapter.record.drift > 0 or not adapter.method.info.passes[1] or method in SLOW
        if method == continued:
            adapter.save(tmp_path / "state.safetensors")
            loaded = acclimate.load(tmp_path / "state.safetensors", tiny(name))
            assert torch.equal(loaded(images), adapter(images))
            assert_identical(loaded.state.capture(), adapter.state.capture(), f"{method} after load")
        adapter.reset()
        assert_identical(adapter.state.capture(), before, f"{method} after reset")
        assert adapter.unwrap() is model
        assert_identical(dict(model.state_dict()), source, f"{method} after unwrap")
        assert dict(model.named_modules()) == modules
    assert torch.equal(logits(model, batches(name)[0]), expected)


def test_the_head_is_found(name):
    """Features and head are what a pass really has between the two."""
    seen = view_of(tiny(name))
    if "features" not in seen.parts:
        assert name in ("DeiT, distilled", "temperature")
        return
    with torch.no_grad():
        features, out = seen.features(batches(name)[0])
        torch.testing.assert_close(seen.classify(features), out)
        torch.testing.assert_close(features @ seen.head_weight().T + seen.classify(torch.zeros_like(features)), out)
    assert features.shape == (4, seen.feature_width)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_a_compiled_or_parallel_module_adapts_as_the_module_inside(wrap, tmp_path):
    inner, plain = tiny("ResNet"), tiny("ResNet")
    outer = wrap(inner)
    ours, theirs = acclimate.adapt(outer, "tent"), acclimate.adapt(plain, "tent")
    for images in batches("ResNet"):
        assert torch.equal(ours(images), theirs(images))
    with pytest.raises(ModelError, match="wrapped already"):
        acclimate.adapt(outer, "tent")
    ours.save(tmp_path / "state.safetensors")
    assert ours.unwrap() is outer
    assert torch.equal(acclimate.load(tmp_path / "state.safetensors", plain_copy(theirs))(images), theirs(images))


def plain_copy(adapter):
    """Return an unwrapped copy of the model of an adapter."""
    return copy.deepcopy(adapter).unwrap()


def test_any_module_that_returns_logits_suits_methods_of_logits():
    class Own(nn.Module):
        """Neither layers that torch knows, nor a head."""

        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(10, 3, generator=torch.Generator().manual_seed(0)))

        def forward(self, images):
            return images.mean((2, 3)) @ self.rows.T

    model, images = Own(), torch.randn(4, 3, 17, 23)
    for method in ("source", "lame"):
        adapter = acclimate.adapt(model, method)
        assert adapter(images).shape == (4, 10)
        adapter.unwrap()
    with pytest.raises(
        ModelError, match=r"tent needs normalisation layers.*suit this model: source, cotta, dda, lame, memo\."
    ):
        acclimate.adapt(model, "tent")
    with pytest.raises(ModelError, match=r"recentre needs a linear head, whose input are the features"):
        acclimate.adapt(model, "source", recentre=True)


def test_several_outputs_are_refused():
    class Pair(nn.Module):
        def forward(self, images):
            return images.mean((2, 3)), images

    with pytest.raises(ModelError, match="for two images it returns a tuple, and not logits"):
        acclimate.adapt(Pair(), "source")


def test_a_model_that_says_what_it_takes():
    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5 * 20 * 30, 4)

        def forward(self, images):
            return self.fc(images.flatten(1))

    model = Strict()
    with pytest.raises(ModelError, match=r"took no random images.*model.pretrained_cfg = \{'input_size'"):
        acclimate.adapt(model, "t3a")
    model.pretrained_cfg = {"input_size": (5, 20, 30)}
    assert acclimate.adapt(model, "t3a")(torch.randn(2, 5, 20, 30)).shape == (2, 4)


def test_the_trace_leaves_no_trace():
    model = tiny("ResNet").train()
    before, state = [m.training for m in model.modules()], torch.random.get_rng_state()
    buffers = {key: tensor.clone() for key, tensor in model.named_buffers()}
    view_of(model)
    assert [m.training for m in model.modules()] == before and torch.equal(torch.random.get_rng_state(), state)
    assert_identical(dict(model.named_buffers()), buffers, "after the trace")
    assert not any(m._forward_hooks for m in model.modules())


def test_the_page_is_current():
    """docs/models.md shows what the tool writes."""
    if not all(member.is_installed for member in ZOO.values()):
        pytest.skip("a library is not installed")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import refresh_models as tool
    finally:
        sys.path.remove(str(ROOT / "tools"))
    page = (ROOT / "docs" / "models.md").read_text()
    for table in (tool.families(), tool.methods()):
        assert table in page, "run python tools/refresh_models.py"
