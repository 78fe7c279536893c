"""The structural view: parts, surgery that changes nothing, and errors that name what is missing."""

from __future__ import annotations

import threading

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import acclimate
from acclimate.errors import ModelError
from acclimate.models.families import view_of
from acclimate.models.fingerprint import fingerprint
from acclimate.models.surgery import capture
from acclimate.models.view import parameters_of, samples_interact
from acclimate.testing.check import SIZES, tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


def logits(model, images):
    with torch.no_grad():
        out = model(images)
    return getattr(out, "logits", out)


def test_parts(family):
    view = view_of(tiny_model(family))
    assert view.family == family
    assert len(view.blocks) == SIZES.depth
    assert [len(block.norms) for block in view.blocks] == [2] * SIZES.depth
    assert len(view.norms) == 2 * SIZES.depth + 1
    assert (view.width, view.blocks[0].heads, view.classes, view.channels, view.image_size) == (
        SIZES.width,
        2,
        10,
        3,
        (32, 32),
    )
    assert view.tokens == 17
    assert sum(p.numel() for p in parameters_of(view.norms)) == (2 * SIZES.depth + 1) * 2 * SIZES.width


def test_open_attention_and_short_last_block_compute_the_same(family):
    model = double_model(family)
    images = double_batches(1)[0]
    expected = logits(model, images)
    modules = dict(model.named_modules())
    view = view_of(model)
    for block in view.blocks:
        block.open()
    assert_exact(logits(model, images), expected)
    view.shorten()
    assert_exact(logits(model, images), expected)
    view.restore()
    assert dict(model.named_modules()) == modules
    assert torch.equal(logits(model, images), expected)


def test_features_enter_the_head(family):
    model = double_model(family)
    view = view_of(model)
    with torch.no_grad():
        features, out = view.features(double_batches(1)[0])
        assert features.shape == (6, SIZES.width)
        assert_exact(view.head(features), out)
    assert not view.head._forward_hooks


@pytest.mark.parametrize(("first", "second"), [(0, 2), (1, SIZES.depth - 1)])
def test_prompts_are_tokens_from_their_block_to_the_next_that_has_its_own(family, first, second):
    model = double_model(family)
    images = double_batches(1)[0]
    modules, expected = dict(model.named_modules()), logits(model, images)
    view = view_of(model)
    prompts = {i: nn.Parameter(torch.randn(count, SIZES.width).double()) for i, count in ((first, 3), (second, 2))}
    with torch.no_grad(), capture([view.layers[0], view.layers[-1], view.head]) as seen:
        view.logits(images)
    tokens = seen[view.layers[0]].inputs
    with torch.no_grad():
        for i, layer in enumerate(view.layers):
            held = 3 if first < i else 0
            if i in prompts:
                rows = prompts[i].expand(len(images), -1, -1)
                tokens = torch.cat([tokens[:, :1], rows, tokens[:, 1 + (held if i == second else 0) :]], dim=1)
            tokens = layer(tokens)
    view.prompt(prompts)
    for shorten in (False, True):
        if shorten:
            view.shorten()
        with torch.no_grad(), capture([view.layers[-1]]) as seen:
            prompted = view.logits(images)
        left = seen[view.layers[-1]].outputs
        assert left.shape[1] == (1 if shorten else view.tokens)
        assert_exact(left[:, 0], tokens[:, 0])
        assert not torch.allclose(prompted, expected, atol=1e-3)
    assert not any(p is q for p in prompts.values() for q in model.parameters())
    view.restore()
    assert dict(model.named_modules()) == modules
    assert torch.equal(logits(model, images), expected)


def test_prompts_never_reach_a_head_that_averages():
    view = view_of(
        VisionTransformer(img_size=32, patch_size=8, embed_dim=SIZES.width, depth=2, num_heads=2, global_pool="avg")
    )
    view.prompt({0: nn.Parameter(torch.randn(3, SIZES.width))})
    with capture([view.layers[-1]]) as seen:
        view.logits(tiny_batches(1)[0])
    assert seen[view.layers[-1]].outputs.shape[1] == view.tokens


def test_a_tap_sees_its_own_thread_alone():
    layer, seen_there = nn.Identity(), []
    with capture([layer]) as seen:
        thread = threading.Thread(target=lambda: seen_there.append(layer(torch.ones(1))))
        thread.start()
        thread.join()
        assert seen_there and not seen


def test_timm_variants_compute_the_same():
    """Registers, layer scale, q-k norm, attention norm, pre-norm, average pooling, no position for the class token."""
    common = dict(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=10)
    variants = [
        dict(reg_tokens=4, init_values=0.1),
        dict(qk_norm=True, pre_norm=True),
        dict(scale_attn_norm=True),
        dict(no_embed_class=True, reg_tokens=2),
        dict(global_pool="avg", class_token=True),
        dict(qkv_bias=False),
    ]
    for kwargs in variants:
        torch.manual_seed(0)
        model = VisionTransformer(**{**common, **kwargs}).eval()
        for p in model.parameters():
            nn.init.normal_(p, std=0.2)
        images = double_batches(1)[0]
        expected = logits(model.double(), images)
        view = view_of(model)
        for block in view.blocks:
            block.open()
        view.shorten()
        assert_exact(logits(model, images), expected, str(kwargs))


@pytest.mark.parametrize(
    ("name", "depth", "width", "norm_scalars"),
    [
        ("vit_tiny_patch16_224", 12, 192, 25 * 2 * 192),
        ("vit_base_patch16_224", 12, 768, 38_400),
        ("vit_large_patch16_224", 24, 1024, 49 * 2 * 1024),
        ("deit_small_patch16_224", 12, 384, 25 * 2 * 384),
        ("deit3_small_patch16_224", 12, 384, 25 * 2 * 384),
    ],
)
def test_published_shapes(name, depth, width, norm_scalars):
    with torch.device("meta"):
        view = view_of(timm.create_model(name))
    assert (len(view.blocks), view.width) == (depth, width)
    assert sum(p.numel() for p in parameters_of(view.norms)) == norm_scalars


def test_weights_from_a_local_file(tmp_path):
    """timm's own loading is what a user has; the view does not care where the weights come from."""
    kwargs = dict(img_size=32, depth=2, num_classes=10)
    trained = timm.create_model("vit_tiny_patch16_224", **kwargs).eval()
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    loaded = timm.create_model("vit_tiny_patch16_224", checkpoint_path=str(tmp_path / "weights.safetensors"), **kwargs)
    images = double_batches(1)[0]
    assert_exact(acclimate.adapt(loaded.double(), "source")(images), logits(trained.double(), images))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.BatchNorm1d(3), r"took no random images of a usual size \(expected 2D or 3D input"),
        (lambda: nn.Conv2d(3, 8, 3), r"returns a tensor of shape \(2, 8, 222, 222\), and not logits"),
        (lambda: nn.LSTM(32, 3), "for two images it returns a tuple, and not logits|took no random images"),
        (lambda: timm.create_model("test_resnet", num_classes=0), r"it has no head \(num_classes=0\)"),
        (lambda: timm.create_model("vit_tiny_patch16_224", num_classes=0), r"it has no head \(num_classes=0\)"),
        (lambda: "vit", "not str"),
    ],
)
def test_a_model_that_cannot_be_adapted_is_named(build, message):
    with pytest.raises(ModelError, match=message):
        view_of(build())


def test_samples_interact_only_through_batch_statistics():
    model = tiny_model()
    assert not samples_interact(model)
    model.patch_embed.norm = nn.BatchNorm1d(16)
    assert not samples_interact(model.eval())
    assert samples_interact(model.train())
    model.patch_embed.norm = nn.BatchNorm1d(16, track_running_stats=False)
    assert samples_interact(model.eval())


def test_fingerprint_tells_architecture_from_weights():
    def of(model):
        return fingerprint(view_of(model), model.state_dict())

    a, b = tiny_model(), tiny_model()
    assert of(a) == of(b)
    with torch.no_grad():
        b.blocks[1].mlp.fc1.weight[0, 0] += 1
    assert of(a)["architecture"] == of(b)["architecture"]
    assert of(a)["weights"] != of(b)["weights"]
    b.head = nn.Linear(SIZES.width, 11)
    assert of(a)["architecture"] != of(b)["architecture"]
    for change in (lambda m: setattr(m.blocks[0].attn, "num_heads", 4), lambda m: setattr(m.norm, "eps", 1e-3)):
        c = tiny_model()
        change(c)  # nothing that a name or a shape would show
        assert of(a)["architecture"] != of(c)["architecture"] and of(a)["weights"] == of(c)["weights"]


def test_a_head_with_one_output_is_refused():
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=1)
    with pytest.raises(ModelError, match="its head has one output"):
        view_of(model)
