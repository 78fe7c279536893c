"""The engine's passes equal the whole-batch form, for any micro-batch size and any selection."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import acclimate
from acclimate.core.engine import Engine, entropy
from acclimate.core.microbatches import _pool
from acclimate.core.parameters import global_norm
from acclimate.errors import ConfigError, NonFiniteError
from acclimate.models.families import view_of
from acclimate.models.view import parameters_of
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model


def engine_on(model, **options) -> Engine:
    model.eval().requires_grad_(False)
    view = view_of(model)
    names = {p: name for name, p in model.named_parameters()}
    parameters = parameters_of(norm for block in view.blocks[:3] for norm in block.norms)
    for p in parameters:
        p.requires_grad_(True)
    view.shorten()
    return Engine(view, {names[p]: p for p in parameters}, rng=torch.Generator(), **options)


def below(margin):
    def objective(logits):
        h = entropy(logits)
        return h, h.detach() < margin

    return objective


def gradients(engine):
    return {name: p.grad for name, p in engine.adapted.named.items()}


def whole_batch(images, margin):
    """The same, as one would write it first, on a model that nobody has touched."""
    model = double_model().requires_grad_(False)
    parameters = {
        n: p for n, p in model.named_parameters() if "norm" in n and n.startswith(("blocks.0", "blocks.1", "blocks.2"))
    }
    for p in parameters.values():
        p.requires_grad_(True)
    logits = model(images)
    h = entropy(logits)
    keep = h < margin
    if keep.any():
        h[keep].mean().backward()
    return logits.detach(), keep, {name: p.grad for name, p in parameters.items()}


@pytest.mark.numerics
@given(
    size=st.integers(1, 9),
    micro_batch=st.integers(1, 10),
    margin=st.sampled_from([0.0, 0.6, 0.9, 1.4, 9.0]),
    seed=st.integers(0, 3),
)
def test_micro_batches_equal_the_whole_batch(size, micro_batch, margin, seed):
    images = double_batches(1, size, seed)[0]
    engine = engine_on(double_model(), micro_batch=micro_batch)
    result = engine.gradient(images, below(margin))
    logits, keep, expected = whole_batch(images, margin)
    assert_exact(result.logits, logits)
    assert torch.equal(result.kept, keep)
    assert gradients(engine).keys() == expected.keys()
    for name, gradient in gradients(engine).items():
        if expected[name] is None:
            assert gradient is None
        else:
            assert_exact(gradient, expected[name], name)


@pytest.mark.numerics
@given(size=st.integers(1, 9), micro_batch=st.integers(1, 10))
def test_predict_equals_the_model(size, micro_batch):
    images = double_batches(1, size)[0]
    with torch.no_grad():
        expected = double_model()(images)
    assert_exact(engine_on(double_model(), micro_batch=micro_batch).predict(images), expected)


def count_backward(engine, images, margin):
    """How many samples a gradient result forwards, and how many it passes backward."""
    counts = {"forward": 0, "backward": 0}

    def hook(module, args, output):
        counts["forward"] += len(output)
        if output.requires_grad:
            output.register_hook(lambda gradient: counts.__setitem__("backward", counts["backward"] + len(gradient)))

    handle = engine.view.head.register_forward_hook(hook)
    kept = engine.gradient(images, below(margin)).used
    handle.remove()
    return counts, kept


def test_rejected_samples_are_not_passed_backward():
    images = tiny_batches(1, 8)[0]
    engine = engine_on(tiny_model(), micro_batch=1)
    h = [0.0, *entropy(engine.predict(images)).sort().values.tolist(), math.inf]
    for kept in (0, 1, 4, 8):
        margin = (h[kept] + h[kept + 1]) / 2
        assert count_backward(engine, images, margin) == ({"forward": 8, "backward": kept}, kept)
    # where few of a larger micro-batch are kept, these are passed again on their own
    engine = engine_on(tiny_model(), micro_batch=8)
    assert count_backward(engine, images, (h[2] + h[3]) / 2) == ({"forward": 10, "backward": 2}, 2)


def test_no_more_than_a_micro_batch_is_passed_at_once():
    seen = []
    engine = engine_on(tiny_model(), micro_batch=3)
    engine.view.head.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    engine.gradient(tiny_batches(1, 8)[0], below(math.inf))
    assert sorted(seen) == [2, 3, 3]


@pytest.mark.numerics
def test_samples_that_interact_are_passed_whole():
    torch.manual_seed(0)
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=10)
    model.patch_embed.proj = nn.Sequential(model.patch_embed.proj, nn.BatchNorm2d(32, track_running_stats=False))
    for p in model.head.parameters():
        nn.init.normal_(p, std=0.5)
    model, images = model.double(), double_batches(1, 8)[0]
    with torch.no_grad():
        expected = model.eval()(images)
    engine = engine_on(model, micro_batch=2)
    result = engine.gradient(images, below(float(entropy(expected).sort().values[2:4].mean())))
    assert result.used == 3  # so few that independent samples would have been passed again on their own
    assert_exact(result.logits, expected)


@pytest.mark.numerics
def test_perturbed_stands_at_the_radius_and_comes_back():
    engine = engine_on(double_model())
    before = [p.detach().clone() for p in engine.adapted.tensors]
    engine.gradient(double_batches(1)[0], below(math.inf))
    gradient = [p.grad.clone() for p in engine.adapted.tensors]
    with engine.adapted.perturbed(0.05):
        moved = [p.detach() - b for p, b in zip(engine.adapted.tensors, before)]
        assert_exact(global_norm(moved), 0.05)
        cosine = sum(float((m * g).sum()) for m, g in zip(moved, gradient)) / float(
            global_norm(moved) * global_norm(gradient)
        )
        assert_exact(cosine, 1.0)
    assert all(torch.equal(p, b) for p, b in zip(engine.adapted.tensors, before))
    with pytest.raises(KeyboardInterrupt), engine.adapted.perturbed(0.05):
        raise KeyboardInterrupt
    assert all(torch.equal(p, b) for p, b in zip(engine.adapted.tensors, before))


def test_a_gradient_that_is_not_finite_changes_nothing():
    engine = engine_on(tiny_model())
    with pytest.raises(NonFiniteError):
        engine.gradient(tiny_batches(1)[0], lambda z: (z.sum(1) * math.inf, torch.ones(len(z), dtype=torch.bool)))
    assert all(p.grad is None for p in engine.adapted.tensors)


@pytest.mark.numerics
def test_classes_are_masked_before_the_softmax():
    images = double_batches(1)[0]
    engine = engine_on(double_model(), classes=[7, 1, 4])
    full = engine_on(double_model()).predict(images)
    assert_exact(engine.predict(images), full[:, [7, 1, 4]])
    assert engine.num_classes == 3
    result = engine.gradient(images, below(math.inf))
    assert_exact(result.losses, entropy(full[:, [7, 1, 4]]))


@pytest.mark.numerics
def test_drift_is_relative_to_the_source():
    engine = engine_on(double_model())
    assert engine.adapted.drift() == 0
    with torch.no_grad():
        for p in engine.adapted.tensors:
            p.mul_(1.5)
    assert_exact(engine.adapted.drift(), 0.5)


def test_entropy_of_extreme_logits():
    assert_exact(entropy(torch.zeros(1, 8, dtype=torch.float64)), [math.log(8)])
    assert entropy(torch.tensor([[1e4, 0.0, 0.0]])).item() == 0


@pytest.mark.parametrize("options", [{"micro_batch": 0}, {"micro_batch": 2.5}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        engine_on(tiny_model(), **options)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_autocast_stays_close_to_float32(precision, batches):
    exact = acclimate.adapt(tiny_model(), "dct")
    fast = acclimate.adapt(tiny_model(), "dct", precision=precision)
    for images in batches:
        expected, logits = exact(images), fast(images)
        assert logits.dtype == torch.float32
        assert float((logits - expected).abs().mean()) < 0.15 * float(expected.abs().mean())
    assert all(p.dtype == torch.float32 for p in fast.engine.adapted.tensors)
    assert fast.engine.adapted.drift() > 0


def test_float16_overflow_halves_the_loss_scale_and_skips(batches):
    model = acclimate.adapt(tiny_model(), "tent", precision="float16")
    model(batches[0])
    before = {name: p.clone() for name, p in model.engine.adapted.named.items()}
    model.engine.loss_scale.fill_(2.0**120)
    model(batches[1])
    assert model.record.event.startswith("skipped")
    assert float(model.engine.loss_scale) == 2.0**119
    model.engine.loss_scale.fill_(1.0)
    model(batches[2])
    assert model.record.event is None and float(model.engine.loss_scale) > 1
    model.reset()
    model(batches[0])
    assert all(torch.equal(p, before[name]) for name, p in model.engine.adapted.named.items())


def test_compile_gives_the_same_run(batches):
    plain = acclimate.adapt(double_model(), "dct")
    compiled = acclimate.adapt(double_model(), "dct", compile="aot_eager")
    for images in batches[:2]:
        assert_exact(compiled(images), plain(images))


def test_worker_threads_leave_the_callers_settings_alone():
    threads = torch.get_num_threads()
    engine_on(tiny_model(), micro_batch=1).predict(tiny_batches(1)[0])
    assert torch.get_num_threads() == threads
    assert {_pool(threads).submit(torch.get_num_threads).result() for _ in range(4 * threads)} == {1}
    seen = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [threads]
