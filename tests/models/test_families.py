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
CONTINUED = ("keel", "tent")  # these are saved and loaded
if os.environ.get("ACCLIMATE_FAMILIES") == "all":  # as in .ci/run
    METHODS = CONTINUED = tuple(acclimate.list_methods())
ROOT = Path(__file__).parents[2]
SLOW = ("poem", "rotta", "memo", "adacontrast")  # that wait for more samples, or return to the source


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
    expected = logits(model, batches(name)[0])
    model.train()
    first = next(model.parameters()).requires_grad_(False)
    fitting = fitting_methods(view_of(model))
    source = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    continued = [method for method in CONTINUED if method in fitting]
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
            assert out.shape == (4, 10) and out.isfinite().all()
            assert (adapter.record.event or "recovered").startswith(("recovered", "on trial"))
            if method == "source" and i == 0:
                torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert adapter.record.drift > 0 or not adapter.method.info.passes[1] or method in SLOW
        now, record = adapter.state.capture(), adapter.record
        with adapter.frozen():
            assert torch.equal(adapter(images), adapter(images))
        assert_identical(adapter.state.capture(), now, f"{method} after frozen calls")
        assert adapter.record is record
        if method in continued:
            adapter.save(tmp_path / "state.safetensors")
            loaded = acclimate.load(tmp_path / "state.safetensors", tiny(name))
            assert torch.equal(loaded(images), adapter(images))
            assert_identical(loaded.state.capture(), adapter.state.capture(), f"{method} after load")
        adapter.reset()
        assert_identical(adapter.state.capture(), before, f"{method} after reset")
        adapter(images)
        assert adapter.unwrap() is model
        assert_identical(dict(model.state_dict()), source, f"{method} after unwrap")
        assert dict(model.named_modules()) == modules and all(module.training for module in modules.values())
        assert [id(p) for p in model.parameters() if not p.requires_grad] == [id(first)]
    model.eval()
    assert torch.equal(logits(model, batches(name)[0]), expected)


def test_the_head_is_found(name):
    """Features and head are what a pass really has between the two."""
    seen = view_of(tiny(name))
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


class Own(nn.Module):
    """A backbone whose heads a function turns into logits."""

    def __init__(self, logits_of_heads):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = tiny("ResNet")
        self.backbone.reset_classifier(0)
        self.first, self.second = nn.Linear(self.backbone.num_features, 10), nn.Linear(self.backbone.num_features, 10)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.pretrained_cfg = {"input_size": (3, 32, 32)}
        self.logits_of_heads = logits_of_heads

    def forward(self, images):
        features = self.backbone(images)
        return self.logits_of_heads(self, self.first(features), self.second(features[:, None])[:, 0])


LINEAR = {
    "mean": lambda m, a, b: (a + b) / 2,
    "weighted": lambda m, a, b: m.scale * a - 3 * b,
    "temperature": lambda m, a, b: a / 1.7,
    "auxiliary": lambda m, a, b: b,
}
NOT_LINEAR = {
    "log-softmax": lambda m, a, b: a.log_softmax(-1),
    "softmax": lambda m, a, b: a.softmax(-1),
    "rectified": lambda m, a, b: a.relu(),
    "capped": lambda m, a, b: 30 * (a / 30).tanh(),
    "of length 1": lambda m, a, b: a / a.norm(dim=-1, keepdim=True),
    "product": lambda m, a, b: a * b,
    "largest": lambda m, a, b: torch.maximum(a, b),
}


@pytest.mark.parametrize("kind", LINEAR)
def test_a_sum_of_heads_is_a_head_on_all_features(kind):
    model, images = Own(LINEAR[kind]).eval(), torch.randn(4, 3, 32, 32)
    seen = view_of(model)
    with torch.no_grad():
        features, out = seen.features(images)
        assert torch.equal(out, model(images)) and features.shape == (4, seen.feature_width)
        torch.testing.assert_close(seen.classify(features), out)
        expected = seen.classify(features - features.mean(0))
        weight = seen.head_weight()
    torch.testing.assert_close(out - features.mean(0) @ weight.T, expected)
    adapter = acclimate.adapt(model, "neo")
    torch.testing.assert_close(adapter(images), expected)
    adapter.unwrap()
    adapter = acclimate.adapt(model, "source", recentre="mean")
    torch.testing.assert_close(adapter(images), expected)
    adapter.unwrap()
    adapter = acclimate.adapt(model, "keel", margin=9.0)
    adapter(images)
    assert adapter.record.drift > 0


@pytest.mark.parametrize("kind", NOT_LINEAR)
def test_another_function_of_heads_is_no_head(kind):
    model = Own(NOT_LINEAR[kind]).eval()
    assert "features" not in view_of(model).parts
    with pytest.raises(ModelError, match="neo needs a linear head, whose input are the features"):
        acclimate.adapt(model, "neo")


@pytest.mark.parametrize("side", [48, 160, 448])
def test_an_unusual_size_is_found(side):
    model = nn.Sequential(nn.Conv2d(3, 4, 16, 16), nn.Flatten(), nn.Linear(4 * (side // 16) ** 2, 5))
    assert view_of(model).usual_size == (side, side)
    assert acclimate.adapt(model, "t3a")(torch.randn(2, 3, side, side)).shape == (2, 5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_modules_that_cannot_be_seen_are_refused():
    class KeywordOnly(nn.Module):
        def forward(self, *, pixel_values):
            return pixel_values.mean((2, 3))

    lazy = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(10))
    for model, why in (
        (
            torch.jit.trace(tiny("ResNet"), torch.randn(2, 3, 32, 32)),
            r"torch\.jit has compiled it.*module that it was made from",
        ),
        (torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(12, 2))), r"torch\.jit has compiled it"),
        (lazy, "its lazy layers have no weights yet. Pass a batch through it first"),
        (KeywordOnly(), r"did not take a batch of images as its only argument.*Wrap it in a module"),
    ):
        with pytest.raises(ModelError, match=why):
            acclimate.adapt(model, "source")


def test_a_graph_of_torch_fx_adapts_as_its_module():
    images = torch.randn(4, 3, 32, 32)
    for method in ("source", "tent"):
        ours, theirs = (acclimate.adapt(m, method) for m in (torch.fx.symbolic_trace(tiny("ResNet")), tiny("ResNet")))
        for _ in range(2):
            torch.testing.assert_close(ours(images), theirs(images))


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
