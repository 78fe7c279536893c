"""The family of transformers' `ViTForImageClassification`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..surgery import OpenAttention
from ..view import Block, ViT, require_supported
from . import Family, Sizes


class HuggingFaceAttention(OpenAttention):
    """The opened self-attention of a transformers model, which has three separate projections."""

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, tokens, head width)."""
        q, k, v = (self._split(F.linear(tokens, weight, bias)) for weight, bias in self.projections())
        return q, k, v

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of the projections to queries, keys and values."""
        inner: Any = self.inner
        return [(p.weight, p.bias) for p in (inner.q_proj, inner.k_proj, inner.v_proj)]

    def merge(self, heads: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        """Return the output of the attention module, and None in place of the attention weights."""
        inner: Any = self.inner
        return inner.o_proj(heads.transpose(1, 2).flatten(2)), None


def view(model: Any) -> ViT | None:
    """Return the structural view of a transformers ViT, or None for any other model."""
    # A model of this family exists only if its module was imported, so that no import is needed here.
    module = sys.modules.get("transformers.models.vit.modeling_vit")
    if module is None or not isinstance(model, module.ViTForImageClassification):
        return None
    require_supported(
        model, hasattr(model.vit, "layers"), "its layout is that of transformers before 5.10; upgrade transformers"
    )
    layers = model.vit.layers

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(layers):
            kind = type(b.attention)
            require_supported(model, kind is module.ViTAttention, f"the attention of layer {i}, {kind.__name__}, is unknown")
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


def tiny(sizes: Sizes) -> nn.Module:
    """Build a small model for the conformance suite."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        intermediate_size=4 * sizes.width,
        image_size=sizes.image,
        patch_size=sizes.patch,
        num_labels=sizes.classes,
    )
    return ViTForImageClassification(config)


FAMILY = Family("hf", "transformers", view, tiny)
