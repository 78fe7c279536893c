"""The family of transformers' `ViTForImageClassification`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn

from ..plain import TOKEN_WISE, runs_code_of
from ..surgery import SURGERY, OpenAttention, unusual_scale
from ..view import Block, ModelView
from . import Family, Sizes, linear


class HuggingFaceAttention(OpenAttention):
    """The opened self-attention of a transformers model, which has three separate projections."""

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, tokens, head width)."""
        inner: Any = self.inner
        q, k, v = (self._split(project(tokens)) for project in (inner.q_proj, inner.k_proj, inner.v_proj))
        return q, k, v

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of the projections to queries, keys and values."""
        inner: Any = self.inner
        return [(p.weight, p.bias) for p in (inner.q_proj, inner.k_proj, inner.v_proj)]

    @property
    def scale(self) -> float | Tensor | None:
        """The module's own scale, if it is not the usual one."""
        inner: Any = self.inner
        return unusual_scale(inner.scaling, inner.head_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attended values, by a function that a user has registered if the model uses one."""
        function = self._function()
        if function.__module__.startswith("transformers."):
            return super().attend(q, k, v)
        inner: Any = self.inner
        return function(inner, q, k, v, None, dropout=0.0, scaling=inner.scaling)[0].transpose(1, 2)

    def is_product(self) -> bool:
        """Return whether scores are plain products of linear projections with the usual scale."""
        return self._function().__module__.startswith("transformers.") and super().is_product()

    def _function(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """Return the function of queries, keys and values that the model uses."""
        inner: Any = self.inner
        module: Any = sys.modules["transformers.models.vit.modeling_vit"]
        chosen = inner.config._attn_implementation
        return module.ALL_ATTENTION_FUNCTIONS.get_interface(chosen, module.eager_attention_forward)

    def merge(self, heads: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        """Return the output of the attention module, and None in place of the attention weights."""
        inner: Any = self.inner
        return inner.o_proj(heads.transpose(1, 2).flatten(2)), None


@cache
def plain() -> frozenset[type]:
    """Return the classes of the models of transformers that treat every token on its own, except for the attention."""
    from transformers import activations
    from transformers.models.vit.modeling_vit import ViTAttention, ViTForImageClassification, ViTLayer, ViTMLP, ViTModel

    own = {HuggingFaceAttention, ViTForImageClassification, ViTModel, ViTLayer, ViTAttention, ViTMLP}
    found = {kind for kind in vars(activations).values() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    return SURGERY | TOKEN_WISE | own | found


def view_of(model: Any) -> ModelView | None:
    """Return the structural view of a transformers ViT, or None for any other model."""
    # A model of this family exists only if its module was imported, so that no import is needed here.
    module = sys.modules.get("transformers.models.vit.modeling_vit")
    if module is None or not isinstance(model, module.ViTForImageClassification):
        return None
    if not hasattr(model.vit, "layers"):
        return None  # the layout of transformers before 5.10
    layers = model.vit.layers

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(layers):
            opens = HuggingFaceAttention if runs_code_of(b.attention, frozenset({module.ViTAttention})) else None
            heads = getattr(b.attention, "num_attention_heads", 0)
            yield Block(b, f"vit.layers.{i}", "attention", opens, heads, b.layernorm_before, b.layernorm_after, b.mlp)

    return ModelView(
        model=model,
        family="hf",
        blocks=list(blocks()),
        _head=linear(model.classifier),
        width=model.config.hidden_size,
        tokens=model.vit.embeddings.position_embeddings.shape[1],
        channels=model.config.num_channels,
        image_size=tuple(model.vit.embeddings.image_size),
        class_token_suffices=True,
        plain=plain(),
        after=("vit.layernorm", "vit"),
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


FAMILY = Family("hf", "transformers", view_of, tiny)
