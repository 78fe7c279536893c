"""Source, TENT, SAR and DCT: closed-form small cases and the facts that the papers' code implies."""

from __future__ import annotations

import math

import pytest
import timm
import torch

import acclimate
from acclimate.core.engine import entropy
from acclimate.core.registry import find_method
from acclimate.errors import ConfigError
from acclimate.methods._leading import leading_blocks
from acclimate.methods.dct import Conditioner
from acclimate.testing.check import Case, tiny_batches, tiny_model
from support import SINGLE, assert_exact, double_batches, double_model, vit_methods

pytestmark = pytest.mark.numerics


def adapted_values(model):
    return {name: p.detach().clone() for name, p in model.engine.adapted.named.items()}


def momenta(model):
    return {
        n: model.engine.adapted.optimizer.state[p]["momentum_buffer"].clone() for n, p in model.engine.adapted.named.items()
    }


def test_source_is_the_plain_model(family):
    batches, model = double_batches(), double_model(family)
    with torch.no_grad():
        expected = [model(images) for images in batches]
    adapter = acclimate.adapt(model, "source")
    for images, out in zip(batches, expected):
        assert_exact(adapter(images), getattr(out, "logits", out))
    assert adapter.record.used == 0 and adapter.record.drift == 0


def test_tent_step_is_sgd_on_the_mean_entropy():
    plain = double_model()
    norms = [p for n, p in plain.named_parameters() if "norm" in n]
    optimizer = torch.optim.SGD(norms, lr=0.02, momentum=0.9)
    model = acclimate.adapt(double_model(), "tent", lr=0.02)
    for images in double_batches():
        logits = plain(images)
        loss = entropy(logits).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert_exact(model(images), logits)
        assert_exact(model.record.loss, loss)
        assert model.record.used == len(images)
    for ours, theirs in zip(model.engine.adapted.tensors, norms):
        assert_exact(ours, theirs)


@pytest.mark.parametrize(
    ("method", "batch", "options", "expected"),
    [
        ("tent", 6, {}, [0.001 * 6 / 64]),
        ("tent", 1, {}, [0.001 / 64]),
        ("sar", 6, {}, [0.001 * 6 / 64]),
        ("sar", 1, {}, [0.002 / 64]),
        ("sar", 6, {"batch_size": 1}, [0.002 / 64]),
        ("sar", 6, {"lr": 0.3}, [0.3]),
        ("dct", 6, {}, [0.001 * 6 / 64, 0.01]),
        ("dct", 1, {}, [0.001 / 64, 0.01]),
        ("dct", 6, {"batch_size": 64}, [0.001, 0.01]),
        ("dct", 6, {"lr": 0.5, "lr_generator": 0.003}, [0.5, 0.003]),
    ],
)
def test_learning_rates(method, batch, options, expected):
    model = acclimate.adapt(tiny_model(), method, **options)
    model(tiny_batches(1, batch)[0])
    assert rates(model) == pytest.approx(expected)


def rates(model):
    return [group["lr"] for group in model.engine.adapted.optimizer.param_groups]


@pytest.mark.parametrize(("method", "at_64"), [("tent", 0.001), ("eta", 0.001), ("zerosiam", 0.005)])
def test_learning_rates_follow_the_batch(method, at_64, tmp_path):
    """One image first and batches of 16 after it: the stream is learned from as if it had begun with 16."""
    model = acclimate.adapt(tiny_model(), method)
    model(tiny_batches(1, 1)[0])
    model(tiny_batches(1, 16)[0])
    assert rates(model)[0] == pytest.approx(at_64 * 16 / 64)
    model.save(tmp_path / "s.safetensors")
    again = acclimate.load(tmp_path / "s.safetensors", tiny_model())
    for images in (*tiny_batches(1, 3, seed=4), *tiny_batches(2, 16, seed=5)):
        assert torch.equal(model(images), again(images))
    assert rates(again) == rates(model)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("name", vit_methods())
def test_learning_rates_are_those_of_each_batch_and_of_the_reference_those_of_the_first(name, reference):
    model = Case(find_method(name)).wrap(reference=reference)
    for size in (4, 2, 3):
        model(tiny_batches(1, size)[0])
        expected = model.method.optimizer(4 if reference else size)
        if expected is not None:
            assert rates(model) == [group["lr"] for group in expected.param_groups]


def test_learning_rates_of_a_reference_that_begins_with_a_single_image():
    model = acclimate.adapt(tiny_model(), "tent", reference=True)
    for size in (1, 16):
        model(tiny_batches(1, size)[0])
        assert rates(model) == pytest.approx([0.001 / 64])


def test_a_step_that_fails_keeps_the_learning_rates_of_before(monkeypatch):
    model = acclimate.adapt(tiny_model(), "tent")
    model(tiny_batches(1, 16)[0])
    before = rates(model)

    def fail(images, engine):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.method, "step", fail)
    with pytest.raises(KeyboardInterrupt):
        model(tiny_batches(1, 2)[0])
    assert rates(model) == before and int(model.state.batch_size) == 16


@pytest.mark.parametrize(("batch", "expected"), [(32, [5e-4, 1e-3]), (1, [1.5625e-5, 1e-4])])
def test_learning_rates_of_a_deep_model(batch, expected):
    model = acclimate.adapt(deep(24), "dct")
    optimizer = model.method.optimizer(batch)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)


def deep(depth):
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=depth, num_heads=2, num_classes=10)


def test_leading_blocks():
    assert [len(leading_blocks(depth)) for depth in (1, 2, 4, 6, 8, 12, 24, 32)] == [1, 2, 3, 5, 6, 9, 21, 29]


def test_the_reference_skips_by_name_alone():
    model = acclimate.adapt(deep(6), "dct", reference=True)
    assert {int(n.split(".")[1]) for n in model.engine.adapted.named if n.startswith("model/")} == set(range(6))


def test_default_and_reference_skip_rules_of_24_blocks():
    def blocks(model):
        return sorted({int(name.split(".")[1]) for name in model.engine.adapted.named})

    default = acclimate.adapt(deep(24), "dct")
    assert blocks(default) == list(range(21))
    reference = acclimate.adapt(deep(24), "dct", reference=True)
    assert blocks(reference) == [*range(9), *range(12, 21)]
    assert sorted(map(int, reference.method.generators)) == list(range(21))  # 9 to 11 exist, and stay random
    before = reference.method.generators["10"].weights["k"].clone()
    for images in tiny_batches():
        reference(images)
    assert torch.equal(reference.method.generators["10"].weights["k"], before)
    for name in ("sar", "deyo", "rem"):
        assert blocks(acclimate.adapt(deep(24), name, reference=True)) == [*range(9), *range(12, 24)]


@pytest.mark.parametrize(
    ("name", "count", "blocks"), [("vit_base_patch16_224", 15_945_984, 9), ("vit_large_patch16_224", 66_124_800, 21)]
)
def test_generator_sizes(name, count, blocks):
    with torch.device("meta"):
        view = timm.create_model(name)
    assert len(leading_blocks(len(view.blocks))) == blocks
    conditioner = Conditioner(
        view.embed_dim, view.blocks[0].attn.num_heads, parts="qkv", generator=True, zero=True, rng=torch.Generator()
    )
    assert blocks * sum(p.numel() for p in conditioner.parameters()) == count


def test_the_query_conditioner_is_inert(batches):
    """Its choice changes neither logits nor the other conditioners, and alone it is no conditioner at all."""
    three, two = (acclimate.adapt(double_model(), "dct", conditioners=parts) for parts in ("qkv", ("k", "v")))
    for images in batches:
        assert_exact(three(images), two(images))
    alone = acclimate.adapt(double_model(), "dct", conditioners="q", lr=0.01)
    sar = acclimate.adapt(double_model(), "sar", lr=0.01)
    for images in batches:
        assert_exact(alone(images), sar(images))


def class_token_into(model, block, images):
    seen = []
    attention = model.engine.view.blocks[block].attention
    hook = attention.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, 0]))
    with model.frozen():
        model(images)
    hook.remove()
    return torch.cat(seen)


def test_block_zero_sees_a_constant_class_token(batches):
    model = acclimate.adapt(double_model(), "dct", micro_batch=6)
    for images in batches:
        model(images)
    first, second = (model.method.generators[str(i)].conditioners(class_token_into(model, i, batches[0])) for i in (0, 1))
    assert first.shape == (3, 6, 2, 1, 16)
    assert_exact(first, first[:, :1].expand_as(first))
    assert float((second - second[:, :1]).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("init", ["default", "zero"])
def test_conditioned_attention_is_attention_over_one_more_token(init, family, batches):
    """Against the explicit matrix over n+1 queries and keys, whose last row is dropped."""
    model = acclimate.adapt(double_model(family), "dct", init=init, micro_batch=6)
    attention, conditioner = model.engine.view.blocks[1].attention, model.method.generators["1"]
    tokens = torch.randn(5, 17, 32, generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        out = attention(tokens)
        q, k, v = (torch.cat([x, c], 2) for x, c in zip(attention.project(tokens), conditioner.conditioners(tokens[:, 0])))
        matrix = (q @ k.transpose(-2, -1) / math.sqrt(16)).softmax(-1)
        expected = attention.merge((matrix @ v)[:, :, :-1], tokens)
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (out, expected))):
        if b is not None:
            assert_exact(a, b)


def test_zero_initialisation_starts_next_to_the_source(batches):
    with torch.no_grad():
        source = tiny_model()(batches[0])
    distance = {}
    for init in ("default", "zero"):
        with acclimate.adapt(tiny_model(), "dct", init=init).frozen() as model:
            distance[init] = float((model(batches[0]) - source).abs().mean())
    assert 0 < distance["zero"] < 0.5 * distance["default"]


def test_free_conditioners_are_the_same_for_every_sample(batches):
    model = acclimate.adapt(double_model(), "dct", generator=False)
    for images in batches:
        model(images)
    conditioner = model.method.generators["2"]
    assert conditioner.weights is None
    values = conditioner.conditioners(torch.randn(4, 32).double())
    assert_exact(values, values[:, :1].expand_as(values))
    assert not torch.equal(conditioner.biases["v"], model.state.initial["method/generators.2.biases.v"])
    fresh = acclimate.adapt(double_model(), "dct", generator=False)
    assert torch.equal(conditioner.biases["q"], fresh.method.generators["2"].biases["q"])


def test_blocks_option_chooses_the_blocks():
    for given, expected in ((2, [0, 1]), ([1, 3], [1, 3])):
        model = acclimate.adapt(tiny_model(), "dct", blocks=given)
        assert sorted(map(int, model.method.generators)) == expected
        assert sorted({int(n.split(".")[1]) for n in model.engine.adapted.named if n.startswith("model/")}) == expected
        model(tiny_batches(1)[0])
    for wrong in (5, [4], [-1], 0, [], [0, 0]):
        with pytest.raises(ConfigError, match="blocks="):
            acclimate.adapt(tiny_model(), "dct", blocks=wrong)


@pytest.mark.parametrize("method", ["sar", "dct"])
def test_margin_counts_the_classes_of_the_target(method):
    """0.4 ln C with C the subset's size; the released code counts the whole head."""
    for reference, count in ((False, 2), (True, 10)):
        model = acclimate.adapt(tiny_model(), method, classes=[3, 8], reference=reference)
        images = tiny_batches(1, 32)[0]
        with model.frozen():
            h = entropy(model(images))
        model(images)
        reliable = int((h < 0.4 * math.log(count)).sum())
        assert reliable > 0
        assert model.record.used <= reliable
        assert abs(model.record.used - reliable) <= 3


@pytest.mark.parametrize("method", ["sar", "dct"])
def test_no_reliable_sample_moves_nothing(method, batches):
    model = acclimate.adapt(tiny_model(), method, lr=0.01)
    model(batches[0])
    before = model.snapshot()
    model.method.margin = 0.0
    model(batches[1])
    assert model.record.used == 0 and model.record.loss is None
    after = model.snapshot()
    assert all(torch.equal(before[n], after[n]) for n in before if n.startswith(("model/", "optimizer/", "method/gen")))


@pytest.mark.parametrize("method", ["sar", "dct"])
def test_reference_momentum_drifts_when_no_sample_is_reliable(method, batches):
    model = (
        acclimate.adapt(double_model(), method, lr=0.01, lr_generator=0.01, reference=True)
        if method == "dct"
        else (acclimate.adapt(double_model(), method, lr=0.01, reference=True))
    )
    model(batches[0])
    values, buffers = adapted_values(model), momenta(model)
    average = float(model.method.average)
    model.method.margin = 0.0
    model(batches[1])
    for name, p in model.engine.adapted.named.items():
        assert_exact(p, values[name] - 0.01 * 0.9 * buffers[name], name)
    assert float(model.method.average) == average


@pytest.mark.parametrize("method", ["sar", "dct"])
def test_recovery_starts_afresh_and_reference_does_not(method, batches):
    for reference in (False, True):
        model = acclimate.adapt(double_model(), method, lr=0.01, recovery=9.0, reference=reference)
        model(batches[0])
        assert model.record.event == "recovered"
        assert model.record.recovery == pytest.approx(model.record.loss, rel=SINGLE)  # it is kept in float32
        assert all(torch.equal(p, s) for p, s in zip(model.engine.adapted.tensors, model.engine.adapted.source))
        assert math.isnan(model.method.average) is (not reference)
        assert bool(model.engine.adapted.optimizer.state) is reference
        with model.frozen():
            expected = model(batches[1])
        assert_exact(model(batches[1]), expected)


def test_recovery_average_is_a_moving_average(batches):
    model = acclimate.adapt(double_model(), "sar", lr=0.01, recovery=0.0, decay=0.7)
    expected = None
    for images in batches:
        model(images)
        loss = model.record.loss
        expected = loss if expected is None else 0.7 * expected + 0.3 * loss
        assert model.record.recovery == pytest.approx(expected, rel=len(batches) * SINGLE)  # it is kept in float32


@pytest.mark.parametrize(
    "options",
    [
        {"conditioners": "qx"},
        {"conditioners": "kk"},
        {"recovery": None},
        {"conditioners": ""},
        {"init": "ones"},
        {"lr": -1},
        {"lr_generator": "fast"},
        {"margin": math.nan},
        {"momentum": 1.5},
        {"decay": -0.1},
        {"batch_size": 0},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "dct", **options)


@pytest.mark.parametrize("name", vit_methods())
def test_no_step_takes_more_passes_than_declared(name):
    """A few kept samples may be passed forward once more, which is cheaper than backward through all."""
    adapter = Case(find_method(name)).wrap(guard=None)
    forward, backward = adapter.method.info.passes
    passes = adapter.engine.passes
    for i, images in enumerate(tiny_batches(3, size=8)):
        before = passes.forward, passes.backward
        adapter(images)
        centre = 8 if i == 0 and adapter.recentring is not None else 0  # the first batch is passed to find a centre
        assert passes.forward - before[0] <= 8 * (forward + backward / 2) + centre
        assert passes.backward - before[1] <= 8 * backward
    assert passes.forward >= 24 and (passes.backward > 0) == (backward > 0)
