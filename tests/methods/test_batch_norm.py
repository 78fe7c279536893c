"""Methods on networks with BatchNorm: which statistics act, what is learned, and at which rate."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import acclimate
from acclimate.core.engine import entropy
from acclimate.errors import ConfigError, InputError, ModelError
from acclimate.models.families import view_of
from acclimate.testing.check import Case, assert_identical, tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


def with_batch_statistics(model):
    """Return a copy of a model that normalises as the released code of TENT does."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    for norm in (m for m in model.modules() if isinstance(m, _BatchNorm)):
        norm.requires_grad_(True)
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = None
    return model


def group_normed():
    """Return a ResNet with GroupNorm."""
    model = double_model("resnet")
    for name, norm in list(model.named_modules()):
        if isinstance(norm, _BatchNorm):
            model.set_submodule(name, nn.GroupNorm(2, norm.num_features).double())
    return model


def test_tent_is_the_plain_loop_of_its_authors():
    model, plain = double_model("resnet"), with_batch_statistics(double_model("resnet"))
    adapter = acclimate.adapt(model, "tent", micro_batch=2)
    parameters = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.00025 * 6 / 64, momentum=0.9)
    for images in double_batches(3):
        logits = plain(images)
        entropy(logits).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_exact(adapter(images), logits)
    for ours, theirs in zip(adapter.engine.adapted.tensors, parameters, strict=True):
        assert_exact(ours, theirs)
    with adapter.frozen(), torch.no_grad():
        images = double_batches(1, seed=9)[0]
        assert_exact(adapter(images), plain(images))


def test_statistics_of_the_source_act_in_methods_that_change_no_norm():
    model, images = double_model("resnet"), double_batches(1)[0]
    with torch.no_grad():
        expected = model(images)
    for method in ("source", "t3a", "neo", "lame"):
        adapter = acclimate.adapt(copy.deepcopy(model), method)
        assert not adapter.engine.samples_interact
        assert_exact(adapter.engine.predict(images), expected)


@pytest.mark.parametrize("method", ["tent", "norm", "memo", "rotta", "cotta"])
def test_the_statistics_of_the_source_are_given_back(method):
    model = tiny_model("resnet").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [(m.training, getattr(m, "track_running_stats", None), len(m._forward_pre_hooks)) for m in model.modules()]
    adapter = Case(acclimate.core.registry.find_method(method)).wrap(model)
    assert adapter.engine.samples_interact and adapter.engine.micro_batches.whole
    adapter(tiny_batches(1)[0])
    assert adapter.unwrap() is model
    assert_identical(dict(model.state_dict()), before, "after unwrap")
    assert flags == [
        (m.training, getattr(m, "track_running_stats", None), len(m._forward_pre_hooks)) for m in model.modules()
    ]


def test_norm_without_a_prior_uses_the_batch_alone():
    images = double_batches(1)[0]
    adapter = acclimate.adapt(double_model("resnet"), "norm", prior=0)
    assert_exact(adapter(images), with_batch_statistics(double_model("resnet"))(images).detach())


@pytest.mark.parametrize("count", [1, 6])
def test_norm_mixes_the_statistics_by_numbers_of_images(count):
    """In a network with a single BatchNorm the mixture can be written down."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    )
    nn.init.normal_(model[1].weight)
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    model.double().eval()
    images, share = double_batches(1)[0][:count], count / (count + 16)
    plain, x = copy.deepcopy(model), model[0](images)
    plain[1].running_mean.lerp_(x.mean((0, 2, 3)).detach(), share)
    plain[1].running_var.lerp_(x.var((0, 2, 3), correction=0).detach(), share)
    assert_exact(acclimate.adapt(model, "norm")(images), plain(images).detach())


def test_norm_is_refused_without_batch_norm():
    with pytest.raises(ModelError, match=r"norm needs BatchNorm layers.*timm VisionTransformer lacks"):
        acclimate.adapt(tiny_model(), "norm")


def test_the_statistics_of_rotta_follow_its_memory():
    adapter = acclimate.adapt(double_model("resnet"), "rotta", memory=6, every=6, alpha=0.25, lambda_u=0, mean=0.5, std=0.5)
    norm, statistics = view_of(adapter.model).batch_norms[0], adapter.method.statistics[0]
    seen = []
    adapter.model.stem.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    adapter(double_batches(1)[0])
    assert_exact(statistics.mean, norm.running_mean.lerp(seen[1].mean((0, 2, 3)), 0.25))  # after the prediction
    assert_exact(statistics.variance, norm.running_var.lerp(seen[1].var((0, 2, 3), correction=0), 0.25))
    moved = statistics.mean.clone()
    with adapter.frozen():
        adapter(double_batches(1, seed=4)[0])
    assert torch.equal(statistics.mean, moved)
    adapter.reset()
    assert torch.equal(statistics.mean, norm.running_mean)


def test_a_single_value_per_channel_has_no_statistics():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    adapter = acclimate.adapt(model, "tent")
    before = adapter.snapshot()
    with pytest.raises(InputError, match="1 images of this size are too few for the statistics of a BatchNorm"):
        adapter(tiny_batches(1, 1)[0])
    assert_identical(adapter.snapshot(), before, "after the error")
    assert acclimate.adapt(adapter.unwrap(), "norm")(tiny_batches(1, 1)[0]).isfinite().all()


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(
    ("name", "left_out"), [("test_resnet", "layer4."), ("test_convnext", ("stages.3.", "head.")), ("resnet50", "layer4.")]
)
def test_sar_leaves_out_the_last_stage(name, left_out, reference):
    """Its authors leave out layer4 of a ResNet. The norm of the stem adapts, and a norm after the last stage does not."""
    adapter = acclimate.adapt(timm.create_model(name), "sar", reference=reference)
    norms = {f"model/{path}." for path, m in adapter.model.named_modules() if m in adapter.engine.view.norms}
    adapted = {path.removesuffix("weight").removesuffix("bias") for path in adapter.engine.adapted.named}
    assert adapted == {path for path in norms if not path.removeprefix("model/").startswith(left_out)}
    assert len(adapted) < len(norms)


@pytest.mark.parametrize(
    ("method", "rates"),
    [
        ("tent", {64: 0.00025, 16: 0.0000625}),
        ("eta", {64: 0.00025, 1: 0.00025 / 64}),
        ("sar", {64: 0.00025, 32: 0.00025, 16: 0.000125, 1: 0.00025 / 32}),
        ("deyo", {128: 0.00025, 8: 0.00025 / 4}),
        ("cotta", {64: 0.01}),
        ("memo", {64: 0.00025}),
        ("roid", {64: 0.00025}),
    ],
)
def test_learning_rates_are_those_of_the_authors_for_a_resnet(method, rates):
    for model in (tiny_model("resnet"), group_normed()):
        adapter = acclimate.adapt(model, method, mean=0.5, std=0.5)
        for size, lr in rates.items():
            optimizer = adapter.method.optimizer(size)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(lr), size
            assert isinstance(optimizer, torch.optim.SGD)
        assert optimizer.param_groups[0]["nesterov"] == (method in ("cotta", "roid"))


def test_group_norm_keeps_samples_apart():
    adapter = acclimate.adapt(group_normed(), "tent")
    images = double_batches(1)[0]
    assert not adapter.engine.samples_interact
    whole = adapter.engine.predict(images)
    assert_exact(torch.cat([adapter.engine.predict(image[None]) for image in images]), whole)


def test_processes_cannot_share_a_batch_with_batch_norm():
    class Shared(acclimate.core.ranks.SingleProcess):
        shared = True

    method = acclimate.core.registry.create_method("tent", {})
    with pytest.raises(ConfigError, match="samples of a batch interact"):
        acclimate.Adapter(tiny_model("resnet"), method, ranks=Shared())


@pytest.mark.parametrize("method", ["tent", "norm", "memo", "rotta", "cotta"])
def test_the_guard_compares_with_the_statistics_of_the_source(method):
    model, images = double_model("resnet"), double_batches(1)[0]
    with torch.no_grad():
        expected = model(images)
    adapter = Case(acclimate.core.registry.find_method(method)).wrap(model)
    first = adapter(images)
    state = adapter.state.capture()
    assert_exact(adapter.engine.unadapted(images).logits, expected)
    assert_identical(adapter.state.capture(), state, "after a comparison")
    adapter.reset()
    assert_exact(adapter(images), first)
