"""The family of timm's `VisionTransformer`, which includes ViT and DeiT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..surgery import FusedAttention
from ..view import Block, ViT, require_supported
from . import Family, Sizes


class TimmAttention(FusedAttention):
    """The opened self-attention of a timm model, which may normalise queries and keys, and gate its output."""

    def fused(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the fused projection."""
        inner: Any = self.inner
        return inner.qkv.weight, inner.qkv.bias

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, tokens, head width)."""
        inner: Any = self.inner
        q, k, v = super().project(tokens)
        return inner.q_norm(q), inner.k_norm(k), v

    def merge(self, heads: Tensor, tokens: Tensor) -> Tensor:
        """Return the output of the attention module."""
        inner: Any = self.inner
        out = inner.norm(heads.transpose(1, 2).flatten(2))
        if getattr(inner, "gate", None) is not None:
            out = out * inner.gate(tokens).sigmoid()
        return inner.proj(out)


def view(model: Any) -> ViT | None:
    """Return the structural view of a timm ViT, or None for any other model."""
    from timm.models.vision_transformer import Attention, VisionTransformer
    from timm.models.vision_transformer import Block as TimmBlock

    if not isinstance(model, VisionTransformer):
        return None
    require_supported(model, model.cls_token is not None, "it has no class token, which domain conditioners are made from")
    require_supported(model, not hasattr(model, "head_dist"), "its head reads a distillation token beside the class token")

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(model.blocks):
            require_supported(model, type(b) is TimmBlock, f"block {i} is a {type(b).__name__}, not a plain Block")
            require_supported(
                model, type(b.attn) is Attention, f"the attention of block {i}, {type(b.attn).__name__}, is unknown"
            )
            yield Block(b, "attn", TimmAttention, b.attn.num_heads, b.norm1, b.norm2, b.mlp, b.ls1, b.ls2)

    # The short last block exchanges the projection of keys with the product of queries and keys (`surgery`), which is
    # possible only if no norm of queries or keys is between the two.
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


FAMILY = Family("timm", "timm", view, tiny)
