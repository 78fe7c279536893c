"""Conditioners in attention that only a trace has found: with rotary positions, with a bias, and without a class token."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from torch import nn

import acclimate
from acclimate.errors import ConfigError, ModelError
from acclimate.models.families import view_of
from acclimate.models.surgery import TracedAttention
from acclimate.testing.zoo import ZOO, tiny
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
CONDITIONED = (
    "BEiT",
    "EVA-02",
    "DINOv3 (rotary positions)",
    "DeiT, distilled",
    "HF DINOv2 with registers",
    "HF BEiT",
    "HF CLIP",
    "open_clip, zero-shot",
)


def families(*names):
    return [
        pytest.param(name, marks=pytest.mark.skipif(not ZOO[name].is_installed, reason="a library is not installed"))
        for name in names
    ]


def hidden(model):
    """Hide a ViT from its family, so that only a trace knows its attention."""
    model.patch_embed = nn.Sequential(model.patch_embed)
    return model


def test_it_is_the_attention_of_an_opened_block():
    ours, theirs = acclimate.adapt(hidden(double_model()), "dct", lr=0.1), acclimate.adapt(double_model(), "dct", lr=0.1)
    assert not ours.engine.view.blocks and theirs.engine.view.blocks
    for images in double_batches(3):
        assert_exact(ours(images), theirs(images))
    names = {name.replace("patch_embed.0", "patch_embed") for name in ours.engine.adapted.named}
    assert names == set(theirs.engine.adapted.named)


def extra_of(attention, tokens):
    torch.manual_seed(1)
    shape = (len(tokens), attention.num_heads, 1, tokens.shape[-1] // attention.num_heads)
    return torch.randn(shape).double(), torch.randn(shape).double()


def merged(attention, scores, v, extra_v):
    out = scores.softmax(-1) @ torch.cat([v, extra_v], dim=2)
    return attention.proj(out.transpose(1, 2).flatten(2))


def projected(attention, tokens):
    bias = None if attention.q_bias is None else torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    qkv = F.linear(tokens, attention.qkv.weight, bias)
    return qkv.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()


@torch.no_grad()
def test_the_added_key_has_no_relative_position():
    attention = tiny("BEiT").double().blocks[1].attn
    nn.init.normal_(attention.relative_position_bias_table)
    tokens = torch.randn(3, 17, 32).double()
    extra = extra_of(attention, tokens)
    q, k, v = projected(attention, tokens)
    scores = q @ torch.cat([k, extra[0]], dim=2).transpose(-2, -1) * attention.scale
    scores = scores + F.pad(attention._get_rel_pos_bias(), (0, 1))
    opened = TracedAttention(attention, attention.num_heads)
    opened.condition(lambda token: extra)
    assert_exact(attention(tokens), merged(attention, scores, v, extra[1]))


@torch.no_grad()
def test_the_added_key_has_no_rotary_position():
    model = tiny("DINOv3 (rotary positions)").double()
    attention, prefix = model.blocks[1].attn, model.num_prefix_tokens
    tokens, rope = torch.randn(3, 16 + prefix, 32).double(), model.rope.get_embed(shape=(4, 4)).double()
    extra = extra_of(attention, tokens)
    q, k, v = projected(attention, tokens)
    half = getattr(attention, "rotate_half", False)
    q, k = (torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)], dim=2) for x in (q, k))
    scores = q @ torch.cat([k, extra[0]], dim=2).transpose(-2, -1) * attention.scale
    opened = TracedAttention(attention, attention.num_heads)
    opened.condition(lambda token: extra)
    assert_exact(attention(tokens, rope=rope), merged(attention, scores, v, extra[1]))


@pytest.mark.parametrize("name", families(*CONDITIONED))
def test_conditioners_get_the_class_token_and_act(name):
    model, images = tiny(name).double(), double_batches(1)[0]
    heads = view_of(model).attentions[0].heads
    source = acclimate.adapt(copy.deepcopy(model), "source")(images)
    adapter = acclimate.adapt(model, "dct", margin=9.0)
    assert len(adapter.method.generators) == 3 and heads == 2
    seen = []
    first = adapter.engine.view.attentions[0].attention
    first.register_forward_pre_hook(lambda module, args, kwargs: seen.append((*args, *kwargs.values())[0]), with_kwargs=True)
    conditioner = adapter.method.generators["0"]
    given, generate = [], conditioner.generate
    conditioner.generate = lambda part, token: given.append(token) or generate(part, token)
    before = adapter(images)
    assert torch.equal(given[0], seen[0][:, 0])
    assert (before - source).abs().max() > 1e-6
    moved = [not torch.equal(p, s) for p, s in zip(adapter.engine.adapted.tensors, adapter.engine.adapted.source)]
    assert all(moved)
    del conditioner.generate
    adapter.unwrap()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", families("SigLIP, attention pooling", "SigLIP, mean pooling", "HF SigLIP", "ViT, DeiT"))
def test_the_mean_patch_token_serves_models_without_a_class_token(name):
    model, images = tiny(name), torch.randn(4, 3, 32, 32)
    if name != "ViT, DeiT":
        with pytest.raises(ModelError, match="dct needs a class token"):
            acclimate.adapt(model, "dct")
    adapter = acclimate.adapt(model, "dct", token="mean", margin=9.0)
    attention = adapter.engine.view.attentions[0].open()
    given, generate = [], adapter.method.generators["0"].key_value
    attention.extra = lambda token: given.append(token) or generate(token)
    tokens = torch.randn(2, 17 if name == "ViT, DeiT" else 16, 32)
    attention.inner(tokens)
    torch.testing.assert_close(given[0], tokens[:, -16:].mean(1))
    attention.extra = generate
    adapter(images)
    assert adapter.record.drift > 0
    with pytest.raises(ConfigError, match="token='last': choose"):
        acclimate.adapt(tiny(name), "dct", token="last")


class Encoder(nn.Module):
    """A ViT of layers of torch, which skips its attention modules when it passes images without gradients."""

    def __init__(self):
        super().__init__()
        self.patches, self.cls_token = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.randn(1, 1, 32))
        layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)]
        self.layers, self.fc = nn.Sequential(*layers), nn.Linear(32, 5)

    def forward(self, images):
        patches = self.patches(images).flatten(2).mT
        return self.fc(self.layers(torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1))[:, 0])


def test_attention_that_torch_skips_is_not_offered():
    with pytest.raises(ModelError, match="dct needs self-attention over all tokens of an image"):
        acclimate.adapt(Encoder(), "dct")


class Windows(nn.Module):
    """Attention of single pixels' rows: in windows of them, or of all."""

    def __init__(self, windows):
        super().__init__()
        self.windows, self.norm1, self.norm2 = windows, nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, tokens):
        x = self.norm2(self.norm1(tokens)).reshape(len(tokens) * self.windows, 1, -1, 8)
        return F.scaled_dot_product_attention(x, x, x).reshape(tokens.shape)


@pytest.mark.parametrize(("windows", "found"), [((1, 1), True), ((4, 4, 1, 1), False), ((4, 4), False)])
def test_attention_in_windows_is_not_offered(windows, found):
    layers = nn.Sequential(*map(Windows, windows))
    model = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2), Transposed(), layers, nn.Flatten(), nn.Linear(128, 5))
    model.pretrained_cfg = {"input_size": (3, 32, 32)}
    assert ("attention" in view_of(model).parts) == found
    # in a model of stages of several modules, as many calls may see all tokens as there are stages
    model[3] = nn.Sequential(*(nn.Sequential(*map(Windows, windows[i::2])) for i in range(2)))
    assert ("attention" in view_of(model).parts) == found


class Transposed(nn.Module):
    def forward(self, tokens):
        return tokens.mT


def test_copies_have_attention_of_their_own():
    adapter = acclimate.adapt(tiny("EVA-02"), "dct", margin=9.0)
    images = torch.randn(4, 3, 32, 32)
    copies = copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))
    expected = [adapter(images), adapter(images)]
    for each in copies:
        assert torch.equal(each(images), expected[0]) and torch.equal(each(images), expected[1])
        assert "forward" not in vars(each.unwrap().blocks[0].attn)
    assert torch.equal(adapter.unwrap()(images), tiny("EVA-02")(images))


def test_attention_that_torch_does_not_compute_is_not_offered():
    before = timm.layers.use_fused_attn()
    timm.layers.set_fused_attn(False)
    try:
        model = tiny("EVA-02")
    finally:
        timm.layers.set_fused_attn(before)
    with pytest.raises(ModelError, match="dct needs self-attention over all tokens of an image"):
        acclimate.adapt(model, "dct")
    fused = tiny("EVA-02")
    adapter = acclimate.adapt(fused, "dct")
    for block in fused.blocks:
        block.attn.fused_attn = False
    with pytest.raises(ModelError, match=r"EvaAttention does not compute its attention by torch's scaled_dot_product"):
        adapter(torch.randn(2, 3, 32, 32))


def test_the_guard_compares_with_the_model_without_conditioners():
    model, images = tiny("EVA-02"), torch.randn(4, 3, 32, 32)
    expected = model(images).detach()
    adapter = acclimate.adapt(model, "dct")
    first = adapter(images)
    torch.testing.assert_close(adapter.engine.unadapted(images).logits, expected)
    adapter.reset()
    assert torch.equal(adapter(images), first)
    assert (first - expected).abs().max() > 1e-5
