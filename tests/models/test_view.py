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
from acclimate.models.families import view
from acclimate.models.fingerprint import fingerprint
from acclimate.models.surgery import capture
from acclimate.models.view import parameters_of, samples_interact
from acclimate.testing.check import SIZES, tiny_batches, tiny_vit
from support import assert_exact, double_batches, double_vit

pytestmark = pytest.mark.numerics


def logits(model, images):
    with torch.no_grad():
        out = model(images)
    return getattr(out, "logits", out)


def test_parts(family):
    vit = view(tiny_vit(family))
    assert vit.family == family
    assert len(vit.blocks) == SIZES.depth
    assert [len(block.norms) for block in vit.blocks] == [2] * SIZES.depth
    assert len(vit.norms) == 2 * SIZES.depth + 1
    assert (vit.width, vit.blocks[0].heads, vit.classes, vit.channels, vit.image_size) == (SIZES.width, 2, 10, 3, (32, 32))
    assert vit.tokens == 17
    assert sum(p.numel() for p in parameters_of(vit.norms)) == (2 * SIZES.depth + 1) * 2 * SIZES.width


def test_open_attention_and_short_last_block_compute_the_same(family):
    model = double_vit(family)
    images = double_batches(1)[0]
    expected = logits(model, images)
    modules = dict(model.named_modules())
    vit = view(model)
    for block in vit.blocks:
        block.open()
    assert_exact(logits(model, images), expected)
    vit.shorten()
    assert_exact(logits(model, images), expected)
    vit.restore()
    assert dict(model.named_modules()) == modules
    assert torch.equal(logits(model, images), expected)


def test_features_enter_the_head(family):
    model = double_vit(family)
    vit = view(model)
    with torch.no_grad():
        features, out = vit.features(double_batches(1)[0])
        assert features.shape == (6, SIZES.width)
        assert_exact(vit.head(features), out)
    assert not vit.head._forward_hooks


@pytest.mark.parametrize(("first", "second"), [(0, 2), (1, SIZES.depth - 1)])
def test_prompts_are_tokens_from_their_block_to_the_next_that_has_its_own(family, first, second):
    model = double_vit(family)
    images = double_batches(1)[0]
    modules, expected = dict(model.named_modules()), logits(model, images)
    vit = view(model)
    prompts = {i: nn.Parameter(torch.randn(count, SIZES.width).double()) for i, count in ((first, 3), (second, 2))}
    with torch.no_grad(), capture([vit.layers[0], vit.layers[-1], vit.head]) as seen:
        vit.logits(images)
    tokens = seen[vit.layers[0]].inputs
    with torch.no_grad():
        for i, layer in enumerate(vit.layers):
            held = 3 if first < i else 0
            if i in prompts:
                rows = prompts[i].expand(len(images), -1, -1)
                tokens = torch.cat([tokens[:, :1], rows, tokens[:, 1 + (held if i == second else 0) :]], dim=1)
            tokens = layer(tokens)
    vit.prompt(prompts)
    for shorten in (False, True):
        if shorten:
            vit.shorten()
        with torch.no_grad(), capture([vit.layers[-1]]) as seen:
            prompted = vit.logits(images)
        left = seen[vit.layers[-1]].outputs
        assert left.shape[1] == (1 if shorten else vit.tokens)
        assert_exact(left[:, 0], tokens[:, 0])
        assert not torch.allclose(prompted, expected, atol=1e-3)
    assert not any(p is q for p in prompts.values() for q in model.parameters())
    vit.restore()
    assert dict(model.named_modules()) == modules
    assert torch.equal(logits(model, images), expected)


def test_prompts_never_reach_a_head_that_averages():
    vit = view(VisionTransformer(img_size=32, patch_size=8, embed_dim=SIZES.width, depth=2, num_heads=2, global_pool="avg"))
    vit.prompt({0: nn.Parameter(torch.randn(3, SIZES.width))})
    with capture([vit.layers[-1]]) as seen:
        vit.logits(tiny_batches(1)[0])
    assert seen[vit.layers[-1]].outputs.shape[1] == vit.tokens


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
        vit = view(model)
        for block in vit.blocks:
            block.open()
        vit.shorten()
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
        vit = view(timm.create_model(name))
    assert (len(vit.blocks), vit.width) == (depth, width)
    assert sum(p.numel() for p in parameters_of(vit.norms)) == norm_scalars


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
        (lambda: nn.Linear(3, 3), "Linear is not a vision transformer"),
        (lambda: timm.create_model("resnet18"), "ResNet is not a vision transformer"),
        (
            lambda: VisionTransformer(img_size=32, patch_size=8, class_token=False, global_pool="avg", depth=1),
            "no class token",
        ),
        (lambda: timm.create_model("deit_tiny_distilled_patch16_224"), "distillation token"),
        (lambda: timm.create_model("vit_tiny_patch16_224", num_classes=0), "head"),
        (lambda: VisionTransformer(img_size=32, patch_size=8, depth=0), "no transformer blocks"),
        (lambda: "vit", "not str"),
    ],
)
def test_a_model_that_cannot_be_adapted_is_named(build, message):
    with pytest.raises(ModelError, match=message):
        view(build())


def test_samples_interact_only_through_batch_statistics():
    model = tiny_vit()
    assert not samples_interact(model)
    model.patch_embed.norm = nn.BatchNorm1d(16)
    assert not samples_interact(model.eval())
    assert samples_interact(model.train())
    model.patch_embed.norm = nn.BatchNorm1d(16, track_running_stats=False)
    assert samples_interact(model.eval())


def test_fingerprint_tells_architecture_from_weights():
    def of(model):
        return fingerprint(view(model), model.state_dict())

    a, b = tiny_vit(), tiny_vit()
    assert of(a) == of(b)
    with torch.no_grad():
        b.blocks[1].mlp.fc1.weight[0, 0] += 1
    assert of(a)["architecture"] == of(b)["architecture"]
    assert of(a)["weights"] != of(b)["weights"]
    b.head = nn.Linear(SIZES.width, 11)
    assert of(a)["architecture"] != of(b)["architecture"]
    for change in (lambda m: setattr(m.blocks[0].attn, "num_heads", 4), lambda m: setattr(m.norm, "eps", 1e-3)):
        c = tiny_vit()
        change(c)  # nothing that a name or a shape would show
        assert of(a)["architecture"] != of(c)["architecture"] and of(a)["weights"] == of(c)["weights"]


def test_a_head_with_one_output_is_refused():
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=1)
    with pytest.raises(ModelError, match="its head has one output"):
        view(model)
