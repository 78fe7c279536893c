"""The family of torchvision's `VisionTransformer`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

from ..multihead import OpenMultihead, is_usual
from ..plain import TOKEN_WISE
from ..surgery import SURGERY
from ..view import Block, ModelView
from . import Family, Sizes, linear


@cache
def plain() -> frozenset[type]:
    """Return the classes of torchvision's models that treat every token on its own, except for the attention."""
    from torchvision.models.vision_transformer import Encoder, EncoderBlock, MLPBlock, VisionTransformer

    own = {OpenMultihead, VisionTransformer, Encoder, EncoderBlock, MLPBlock, nn.MultiheadAttention}
    return SURGERY | TOKEN_WISE | own


def view_of(model: Any) -> ModelView | None:
    """Return the structural view of a torchvision ViT, or None for any other model."""
    module = sys.modules.get("torchvision.models.vision_transformer")
    if module is None or not isinstance(model, module.VisionTransformer):
        return None

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(model.encoder.layers):
            attention = b.self_attention
            opens = OpenMultihead if is_usual(attention) else None
            heads = getattr(attention, "num_heads", 0)
            yield Block(b, f"encoder.layers.{i}", "self_attention", opens, heads, b.ln_1, b.ln_2, b.mlp)

    heads = model.heads  # layers, or what a user has put in their place
    conv = next((m for m in model.conv_proj.modules() if isinstance(m, nn.Conv2d)), None)
    return ModelView(
        model=model,
        family="torchvision",
        blocks=list(blocks()),
        _head=linear(heads[-1] if hasattr(heads, "__getitem__") else heads),
        width=model.hidden_dim,
        tokens=model.seq_length,
        channels=conv.in_channels if conv is not None else 3,
        image_size=(model.image_size, model.image_size),
        class_token_suffices=True,
        plain=plain(),
        after=("encoder.ln", "encoder.layers", "encoder"),
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


FAMILY = Family("torchvision", "torchvision", view_of, tiny)
