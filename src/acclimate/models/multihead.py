"""The opened `torch.nn.MultiheadAttention`, which torchvision and open_clip use."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .plain import runs_code_of
from .surgery import FusedAttention


class OpenMultihead(FusedAttention):
    """The opened self-attention of a `torch.nn.MultiheadAttention`."""

    def fused(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the fused projection."""
        inner: Any = self.inner
        return inner.in_proj_weight, inner.in_proj_bias

    def merge(self, heads: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        """Return the output of the attention module, and None in place of the attention weights."""
        inner: Any = self.inner
        # as in torch, which reads the weights of the output projection and does not call it
        return F.linear(heads.transpose(1, 2).flatten(2), inner.out_proj.weight, inner.out_proj.bias), None


def is_usual(attention: Any) -> bool:
    """Return whether an attention module is a `MultiheadAttention` as torchvision builds it."""
    return (
        runs_code_of(attention, frozenset({nn.MultiheadAttention}))
        and attention.in_proj_weight is not None
        and attention.bias_k is None
        and not attention.add_zero_attn
        and attention.batch_first
    )
