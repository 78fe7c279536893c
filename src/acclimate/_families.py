"""timm, Hugging Face and torchvision: one class that opens a family's attention, and one function that finds its parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .vit import Block, OpenAttention, ViT, require


class FusedAttention(OpenAttention):
    """Families that keep the three projections in one (3 width, width) matrix."""

    def fused(self) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = F.linear(tokens, *self.fused()).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return q, k, v

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        weight, bias = self.fused()
        return list(zip(weight.chunk(3), (None, None, None) if bias is None else bias.chunk(3)))


class TimmAttention(FusedAttention):
    def fused(self) -> tuple[Tensor, Tensor | None]:
        inner: Any = self.inner
        return inner.qkv.weight, inner.qkv.bias

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner: Any = self.inner
        q, k, v = super().project(tokens)
        return inner.q_norm(q), inner.k_norm(k), v

    def merge(self, heads: Tensor, tokens: Tensor) -> Tensor:
        inner: Any = self.inner
        out = inner.norm(heads.transpose(1, 2).flatten(2))
        if getattr(inner, "gate", None) is not None:
            out = out * inner.gate(tokens).sigmoid()
        return inner.proj(out)


class HuggingFaceAttention(OpenAttention):
    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._split(F.linear(tokens, weight, bias)) for weight, bias in self.projections())
        return q, k, v

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        inner: Any = self.inner
        return [(p.weight, p.bias) for p in (inner.q_proj, inner.k_proj, inner.v_proj)]

    def merge(self, heads: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        inner: Any = self.inner
        return inner.o_proj(heads.transpose(1, 2).flatten(2)), None


class TorchvisionAttention(FusedAttention):
    def fused(self) -> tuple[Tensor, Tensor | None]:
        inner: Any = self.inner
        return inner.in_proj_weight, inner.in_proj_bias

    def merge(self, heads: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        inner: Any = self.inner
        return inner.out_proj(heads.transpose(1, 2).flatten(2)), None


def _timm(model: Any) -> ViT | None:
    from timm.models.vision_transformer import Attention, VisionTransformer
    from timm.models.vision_transformer import Block as TimmBlock

    if not isinstance(model, VisionTransformer):
        return None
    require(model, model.cls_token is not None, "it has no class token, which domain conditioners are made from")
    require(model, not hasattr(model, "head_dist"), "its head reads a distillation token beside the class token")

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(model.blocks):
            require(model, type(b) is TimmBlock, f"block {i} is a {type(b).__name__}, not a plain Block")
            require(model, type(b.attn) is Attention, f"the attention of block {i}, {type(b.attn).__name__}, is unknown")
            yield Block(b, "attn", TimmAttention, b.attn.num_heads, b.norm1, b.norm2, b.mlp, b.ls1, b.ls2)

    # a norm on queries or keys stands between the projection and the product that the short cut exchanges
    plain = all(isinstance(b.attn.q_norm, nn.Identity) and isinstance(b.attn.k_norm, nn.Identity) for b in model.blocks)
    fixed = getattr(model.patch_embed, "strict_img_size", True) and not model.dynamic_img_size
    return ViT(
        model=model,
        family="timm",
        blocks=list(blocks()),
        head=model.head,
        width=model.embed_dim,
        tokens=model.patch_embed.num_patches + model.num_prefix_tokens,
        channels=model.in_chans,
        image_size=tuple(model.patch_embed.img_size) if fixed else None,
        class_token_suffices=plain and model.global_pool == "token",
        _blocks=model.blocks,
        prefix=model.num_prefix_tokens,
    )


def _hugging_face(model: Any) -> ViT | None:
    # whoever holds such a model has imported its module: no need to import it for everybody else
    module = sys.modules.get("transformers.models.vit.modeling_vit")
    if module is None or not isinstance(model, module.ViTForImageClassification):
        return None
    require(model, hasattr(model.vit, "layers"), "its layout is that of transformers before 5.10; upgrade transformers")
    layers = model.vit.layers

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(layers):
            kind = type(b.attention)
            require(model, kind is module.ViTAttention, f"the attention of layer {i}, {kind.__name__}, is unknown")
            yield Block(
                b,
                "attention",
                HuggingFaceAttention,
                b.attention.num_attention_heads,
                b.layernorm_before,
                b.layernorm_after,
                b.mlp,
            )

    return ViT(
        model=model,
        family="hf",
        blocks=list(blocks()),
        head=model.classifier,
        width=model.config.hidden_size,
        tokens=model.vit.embeddings.position_embeddings.shape[1],
        channels=model.config.num_channels,
        image_size=tuple(model.vit.embeddings.image_size),
        class_token_suffices=True,
        _blocks=layers,
    )


def _torchvision(model: Any) -> ViT | None:
    module = sys.modules.get("torchvision.models.vision_transformer")
    if module is None or not isinstance(model, module.VisionTransformer):
        return None

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(model.encoder.layers):
            attention = b.self_attention
            plain = type(attention) is nn.MultiheadAttention and attention.in_proj_weight is not None
            require(model, plain and attention.bias_k is None and not attention.add_zero_attn,
                     f"the attention of layer {i} is not a plain MultiheadAttention")  # fmt: skip
            yield Block(b, "self_attention", TorchvisionAttention, attention.num_heads, b.ln_1, b.ln_2, b.mlp)

    conv = next((m for m in model.conv_proj.modules() if isinstance(m, nn.Conv2d)), None)
    return ViT(
        model=model,
        family="torchvision",
        blocks=list(blocks()),
        head=model.heads[-1],
        width=model.hidden_dim,
        tokens=model.seq_length,
        channels=conv.in_channels if conv is not None else 3,
        image_size=(model.image_size, model.image_size),
        class_token_suffices=True,
        _blocks=model.encoder.layers,
    )


FAMILIES = (_timm, _hugging_face, _torchvision)
