"""The family of torchvision's `VisionTransformer`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..surgery import FusedAttention
from ..view import Block, ViT, require_supported
from . import Family, Sizes


class TorchvisionAttention(FusedAttention):
    """The opened self-attention of a torchvision model, which is a `torch.nn.MultiheadAttention`."""

    def fused(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the fused projection."""
        inner: Any = self.inner
        return inner.in_proj_weight, inner.in_proj_bias

    def merge(self, heads: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        """Return the output of the attention module, and None in place of the attention weights."""
        inner: Any = self.inner
        return inner.out_proj(heads.transpose(1, 2).flatten(2)), None


def view(model: Any) -> ViT | None:
    """Return the structural view of a torchvision ViT, or None for any other model."""
    module = sys.modules.get("torchvision.models.vision_transformer")
    if module is None or not isinstance(model, module.VisionTransformer):
        return None

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(model.encoder.layers):
            attention = b.self_attention
            plain = type(attention) is nn.MultiheadAttention and attention.in_proj_weight is not None
            require_supported(model, plain and attention.bias_k is None and not attention.add_zero_attn,
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


def tiny(sizes: Sizes) -> nn.Module:
    """Build a small model for the conformance suite."""
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        image_size=sizes.image,
        patch_size=sizes.patch,
        num_layers=sizes.depth,
        num_heads=sizes.heads,
        hidden_dim=sizes.width,
        mlp_dim=4 * sizes.width,
        num_classes=sizes.classes,
    )


FAMILY = Family("torchvision", "torchvision", view, tiny)
