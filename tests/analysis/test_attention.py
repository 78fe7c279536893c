"""Attention weights are those that the model used; distance and rollout of known weights are as known."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import acclimate
from acclimate.analysis.attention import Layout, attention_maps, in_parts, reach, rollout_maps, rollouts
from acclimate.errors import ConfigError, InputError, ModelError
from acclimate.models.families import view_of
from acclimate.models.surgery import capture
from acclimate.testing import replay
from acclimate.testing.check import SIZES, tiny_batches, tiny_model
from support import GOLDEN, assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
GRID = Layout(tokens=10, rows=3, columns=3, patch=4)


def weights(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).softmax(-1)


# ---- of a model ---------------------------------------------------------------------------------------------------


def test_maps_are_those_of_the_model(family):
    """With the values and the output projection they give what the model's own attention gave."""
    model, images = double_model(family), double_batches(1)[0]
    view = view_of(model)
    modules = [block.attention for block in view.blocks]
    with torch.no_grad(), capture(modules) as seen:
        expected = view.logits(images)
    before = dict(model.named_modules())
    for i, attention in attention_maps(model, images):
        assert attention.shape == (len(images), SIZES.heads, 17, 17)
        assert_exact(attention.sum(-1), torch.ones(attention.shape[:-1], dtype=torch.float64))
        opened = view.blocks[i].open_attention(modules[i], SIZES.heads)
        with torch.no_grad():
            tokens = seen[modules[i]].inputs
            out, theirs = opened.merge(attention @ opened.project(tokens)[2], tokens), seen[modules[i]].outputs
        out, theirs = (x[0] if isinstance(x, tuple) else x for x in (out, theirs))
        assert_exact(out, theirs)
    assert i == SIZES.depth - 1
    assert dict(model.named_modules()) == before and not any(m._forward_pre_hooks for m in before.values())
    with torch.no_grad():
        assert torch.equal(view.logits(images), expected)


def test_of_an_adapter_conditioners_and_all_rows_of_the_last_block(family):
    adapter, batches = acclimate.adapt(double_model(family), "dct"), double_batches(2)
    adapter(batches[0])
    state = {name: t.clone() for name, t in adapter.state_dict().items()}
    maps = dict(attention_maps(adapter, batches[1]))
    torch.testing.assert_close(dict(adapter.state_dict()), state, atol=0, rtol=0, equal_nan=True)
    assert list(adapter.method.generators) == ["0", "1", "2"]
    assert [maps[i].shape[2:] for i in range(SIZES.depth)] == [(17, 18)] * 3 + [(17, 17)]
    # the class token's row is what the short cut of the last block used
    last = adapter.engine.view.blocks[-1].open()
    with torch.no_grad(), adapter.frozen(), adapter.engine.undivided(), capture([last]) as seen:
        adapter(batches[1])
        tokens = seen[last].inputs
        short = last.merge((maps[SIZES.depth - 1] @ last.project(tokens)[2])[:, :, :1], tokens[:, :1])
    first = [x[0] if isinstance(x, tuple) else x for x in (short, seen[last].outputs)]
    assert_exact(*first)


def test_the_conditioner_takes_its_share_from_the_others():
    model, images = double_model(), double_batches(1)[0]
    (_, plain), *_ = attention_maps(model, images)
    (_, conditioned), *_ = attention_maps(acclimate.adapt(model, "dct"), images)
    without = conditioned[..., :-1] / conditioned[..., :-1].sum(-1, keepdim=True)
    assert_exact(without, plain)
    assert conditioned[..., -1].min() > 0


def test_a_method_that_predicts_with_a_teacher_shows_the_teacher():
    adapter, images = acclimate.adapt(tiny_model(), "cotta", mean=0.5, std=0.5), tiny_batches(1)[0]
    (_, before), *_ = attention_maps(adapter, images)
    with torch.no_grad():
        for p in adapter.engine.adapted.tensors:
            p.mul_(1.1)  # the student
    (_, student_moved), *_ = attention_maps(adapter, images)
    assert torch.equal(before, student_moved)
    with torch.no_grad():
        for w in adapter.method.teacher.weights:
            w.mul_(1.1)
    (_, teacher_moved), *_ = attention_maps(adapter, images)
    assert not torch.allclose(before, teacher_moved)


def test_a_compiled_adapter_is_seen_too():
    images = double_batches(1)[0]
    plain, compiled = (acclimate.adapt(double_model(), "dct", compile=how) for how in (False, "eager"))
    with compiled.frozen():
        compiled(images)
    for (_, a), (_, b) in zip(attention_maps(plain, images), attention_maps(compiled, images)):
        assert_exact(a, b)


def test_prompts_and_registers_are_not_taken_for_patches():
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=10, reg_tokens=4)
    model, images = model.double(), double_batches(1)[0]
    layout = Layout.of(model, images)
    assert layout == Layout(tokens=21, rows=4, columns=4, patch=8)
    adapter = acclimate.adapt(model, "source")
    view = adapter.engine.view
    view.restore()
    view.prompt({1: nn.Parameter(torch.randn(5, 32).double())})
    view.shorten()
    maps = [attention for _, attention in attention_maps(adapter, images)]
    assert [m.shape[2:] for m in maps] == [(21, 21), (26, 26), (26, 26)]
    seen = [reach(attention, layout) for attention in maps]
    assert torch.equal(seen[0].on_added, torch.zeros(len(images), 2, dtype=torch.float64))
    assert_exact(seen[1].on_added, maps[1][:, :, 10:, 1:6].sum(-1).mean(-1))
    assert_exact(seen[1].on_patches, maps[1][:, :, 10:, 10:].sum(-1).mean(-1))
    rolled = list(rollouts(maps, layout))
    assert rolled[-1].shape == (len(images), 21, 21)
    assert_exact(rolled[-1].sum(-1), torch.ones(len(images), 21, dtype=torch.float64))


def test_parts_are_small_and_complete(model):
    images = torch.randn(130, 3, 32, 32)
    parts = in_parts(model, images)
    assert [len(part) for part in parts] == [64, 64, 2] and torch.equal(torch.cat(parts), images)
    with torch.device("meta"):  # its size is all that counts
        large = VisionTransformer(img_size=224, patch_size=16, embed_dim=1024, depth=24, num_heads=16)
    assert len(in_parts(large, torch.zeros(9, 3, 1, 1))[0]) == 6


def test_bad_input(model):
    with pytest.raises(InputError, match="batch dimension"):
        attention_maps(model, torch.zeros(3, 32, 32))
    with pytest.raises(ModelError, match="this figure needs the blocks of a vision transformer"):
        attention_maps(tiny_model("resnet"), torch.zeros(1, 3, 32, 32))
    with pytest.raises(ModelError, match="16 patches are no grid of squares over an image of 32 x 40"):
        Layout.of(model, torch.zeros(1, 3, 32, 40))
    with pytest.raises(ConfigError, match="added='kept'"):
        list(rollouts([weights(1, 2, 10, 11)], GRID, added="kept"))


def test_layout_of_an_image_that_is_no_multiple_of_the_patch():
    model = VisionTransformer(img_size=(60, 35), patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=10)
    assert Layout.of(model, torch.zeros(1, 3, 60, 35)) == Layout(tokens=29, rows=7, columns=4, patch=8)


# ---- distance -----------------------------------------------------------------------------------------------------


def test_distances_are_euclidean_and_in_pixels():
    apart = GRID.distances()
    assert apart[0].tolist() == [0, 4, 8, 4, 4 * math.sqrt(2), 4 * math.sqrt(5), 8, 4 * math.sqrt(5), 8 * math.sqrt(2)]
    assert torch.equal(apart, apart.T)


def test_reach_of_known_weights():
    uniform = torch.full((1, 2, 10, 10), 0.1, dtype=torch.float64)
    found = reach(uniform, GRID)
    mean = GRID.distances().mean()
    torch.testing.assert_close(found.renormalised, mean.expand(1, 2))
    torch.testing.assert_close(found.distance, (0.9 * mean).expand(1, 2))
    torch.testing.assert_close(found.total, 9 * found.distance)
    torch.testing.assert_close(found.on_patches, torch.full((1, 2), 0.9, dtype=torch.float64))
    at_itself = reach(torch.eye(10, dtype=torch.float64).expand(1, 2, 10, 10), GRID)
    assert all(torch.equal(value, torch.zeros_like(value)) for value in (at_itself.distance, at_itself.renormalised))
    at_class_token = torch.zeros(1, 2, 10, 10)
    at_class_token[..., 0] = 1
    assert reach(at_class_token, GRID).renormalised.tolist() == [[0, 0]]


def test_an_added_key_shrinks_the_distance_and_not_the_renormalised_one():
    plain = weights(2, 3, 10, 10)
    taken = torch.rand(2, 3, 10, 1, dtype=torch.float64)
    more = reach(torch.cat([(1 - taken) * plain, taken], dim=-1), GRID)
    less = reach(plain, GRID)
    torch.testing.assert_close(more.renormalised, less.renormalised)
    assert (more.distance < less.distance).all()
    torch.testing.assert_close(more.on_added, taken[:, :, 1:, 0].mean(-1))


# ---- rollout ------------------------------------------------------------------------------------------------------


def test_rollout_of_known_weights():
    alone = [torch.eye(10, dtype=torch.float64).expand(1, 2, 10, 10)] * 3
    assert torch.equal(list(rollouts(alone, GRID))[-1][0], torch.eye(10, dtype=torch.float64))
    uniform = [torch.full((1, 2, 10, 10), 0.1, dtype=torch.float64)] * 3
    # each block keeps half of what was its own, and spreads the rest: 1 - (1/2)^3 of it is spread evenly
    expected = torch.full((1, 3, 3), (1 - 0.5**3) / 10, dtype=torch.float64)
    torch.testing.assert_close(rollout_maps(uniform, GRID), expected)
    torch.testing.assert_close(rollout_maps(uniform, GRID, residual=0), torch.full_like(expected, 0.1))


def test_rollout_multiplies_later_blocks_from_the_left():
    first, second = weights(1, 1, 10, 10), weights(1, 1, 10, 10, seed=1)
    last = list(rollouts([first, second], GRID, residual=0))[-1]
    torch.testing.assert_close(last, (second @ first)[:, 0])


def test_rollout_without_or_with_the_added_key():
    plain = weights(2, 3, 10, 10)
    taken = torch.rand(2, 3, 10, 1, dtype=torch.float64)
    more = torch.cat([(1 - taken) * plain, taken], dim=-1)
    torch.testing.assert_close(list(rollouts([more], GRID)), list(rollouts([plain], GRID)))
    (folded,) = rollouts([more], GRID, residual=0, added="class")
    torch.testing.assert_close(folded[..., 0], (more[..., 0] + more[..., 10]).mean(1))
    torch.testing.assert_close(folded.sum(-1), torch.ones(2, 10, dtype=torch.float64))


# ---- recorded -----------------------------------------------------------------------------------------------------


def test_a_recording_of_other_weights_fails(tmp_path):
    with safe_open(str(GOLDEN / "analysis_attention.safetensors"), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = file.metadata()
    path = tmp_path / "altered.safetensors"
    save_file(tensors, path, {**header, "hyper": header["hyper"].replace('"residual": 0.5', '"residual": 0.4')})
    assert "rollout" in str(replay.replay(path)) and "FAIL" in str(replay.replay(path))
    save_file({k: t for k, t in tensors.items() if k != "final/conditioner_mass"}, path, header)
    assert "conditioner_mass" in str(replay.replay(path))
    save_file(tensors, path, {**header, "hyper": header["hyper"].replace('"mean"', '"max"')})
    assert "head_fusion='max' is not supported" in str(replay.replay(path))
