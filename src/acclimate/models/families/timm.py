"""The family of timm's `VisionTransformer`, which includes ViT and DeiT."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn

from ..plain import TOKEN_WISE, is_hooked, runs_code_of
from ..surgery import SURGERY, FusedAttention, unusual_scale
from ..view import Block, ModelView
from . import Family, Sizes, linear


class TimmAttention(FusedAttention):
    """The opened self-attention of a timm model, which may normalise queries and keys, and gate its output."""

    def fused(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the fused projection."""
        inner: Any = self.inner
        return inner.qkv.weight, inner.qkv.bias

    def project_fused(self, tokens: Tensor) -> Tensor:
        """Return the output of the fused projection, (batch, tokens, 3 width)."""
        inner: Any = self.inner
        return inner.qkv(tokens)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, tokens, head width)."""
        inner: Any = self.inner
        q, k, v = super().project(tokens)
        return inner.q_norm(q), inner.k_norm(k), v

    @property
    def scale(self) -> float | Tensor | None:
        """The module's own scale, if it uses it and it is not the usual one."""
        inner: Any = self.inner
        return None if inner.fused_attn else unusual_scale(inner.scale, inner.head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attended values, through the module's own dropout of weights if that is not the usual one."""
        inner: Any = self.inner
        if inner.fused_attn or (runs_code_of(inner.attn_drop, TOKEN_WISE) and not is_hooked(inner.attn_drop)):
            return super().attend(q, k, v)
        return inner.attn_drop((q * inner.scale @ k.transpose(-2, -1)).softmax(-1)) @ v

    def is_product(self) -> bool:
        """Return whether scores are plain products of linear projections with the usual scale."""
        inner: Any = self.inner
        return isinstance(inner.q_norm, nn.Identity) and isinstance(inner.k_norm, nn.Identity) and super().is_product()

    def merge(self, heads: Tensor, tokens: Tensor) -> Tensor:
        """Return the output of the attention module."""
        inner: Any = self.inner
        out = inner.norm(heads.transpose(1, 2).flatten(2))
        if getattr(inner, "gate", None) is not None:
            out = out * inner.gate(tokens).sigmoid()
        return inner.proj_drop(inner.proj(out))


@cache
def plain() -> frozenset[type]:
    """Return the classes of timm's plain models that treat every token on its own, except for the attention."""
    from timm import layers
    from timm.models.vision_transformer import Attention, Block, VisionTransformer

    names = (
        "Mlp", "GluMlp", "SwiGLU", "DropPath", "LayerScale", "LayerNorm", "LayerNormFp32", "RmsNorm", "RmsNormFp32",
        "SimpleNorm", "SimpleNormFp32", "GELU", "GELUTanh", "QuickGELU",
    )  # fmt: skip
    found = {getattr(layers, name) for name in names if hasattr(layers, name)}  # some are new in timm
    return SURGERY | TOKEN_WISE | {TimmAttention, VisionTransformer, Block, Attention} | found


def view_of(model: Any) -> ModelView | None:
    """Return the structural view of a timm ViT with a class token and one head, or None for any other model."""
    from timm.models.vision_transformer import Attention, VisionTransformer
    from timm.models.vision_transformer import Block as TimmBlock

    if not isinstance(model, VisionTransformer):
        return None
    if model.cls_token is None or hasattr(model, "head_dist") or not all(isinstance(b, TimmBlock) for b in model.blocks):
        return None

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(model.blocks):
            opens = TimmAttention if runs_code_of(b.attn, frozenset({Attention})) else None
            heads = getattr(b.attn, "num_heads", 0)
            yield Block(b, f"blocks.{i}", "attn", opens, heads, b.norm1, b.norm2, b.mlp, b.ls1, b.ls2)

    # The short last block exchanges the projection of keys with the product of queries and keys (`surgery`), which is
    # possible only if no norm of queries or keys is between the two.
    norms = [getattr(b.attn, name, None) for b in model.blocks for name in ("q_norm", "k_norm")]
    fixed = getattr(model.patch_embed, "strict_img_size", True) and not model.dynamic_img_size
    return ModelView(
        model=model,
        family="timm",
        blocks=list(blocks()),
        _head=linear(model.head),
        width=model.embed_dim,
        tokens=model.patch_embed.num_patches + model.num_prefix_tokens,
        channels=model.in_chans,
        image_size=tuple(model.patch_embed.img_size) if fixed else None,
        class_token_suffices=all(isinstance(norm, nn.Identity) for norm in norms) and model.global_pool == "token",
        plain=plain(),
        after=("blocks", "norm"),
        _blocks=model.blocks,
        prefix=model.num_prefix_tokens,
    )


def tiny(sizes: Sizes) -> nn.Module:
    """Build a small model for the conformance suite."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=sizes.image,
        patch_size=sizes.patch,
        embed_dim=sizes.width,
        depth=sizes.depth,
        num_heads=sizes.heads,
        num_classes=sizes.classes,
    )


FAMILY = Family("timm", "timm", view_of, tiny)
