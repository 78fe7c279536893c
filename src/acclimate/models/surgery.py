"""What is put into a model while it adapts, and taken out again: opened attention, a short last block, prompt tokens.

Each module here stands in the place of one of the model's own, holds it as `inner`, and leaves its parameters alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from .view import Block


class OpenAttention(nn.Module):
    """A block's self-attention, opened between its projections and its output.

    `extra` maps the class token, (batch, width), to further keys and values, (batch, heads, count, head width) each:
    they are attended to and have no output row of their own. With `class_only` the output is that of the class token alone.
    """

    def __init__(self, inner: nn.Module, heads: int) -> None:
        super().__init__()
        self.inner = inner
        self.heads = heads
        self.extra: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self.class_only = False

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (batch, heads, tokens, head width) each."""
        raise NotImplementedError

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight, (width, width), and bias of the projections to queries, keys and values."""
        raise NotImplementedError

    def merge(self, heads: Tensor, tokens: Tensor) -> Any:
        """From the attended values, (batch, heads, tokens, head width), to what the family's attention module returns."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Any:
        if self.class_only:
            return self.merge(self._attend_from_class_token(tokens), tokens[:, :1])
        q, k, v = self.project(tokens)
        if self.extra is not None:
            extra_k, extra_v = self.extra(tokens[:, 0])
            k = torch.cat([k, extra_k.to(k.dtype)], dim=2)
            v = torch.cat([v, extra_v.to(v.dtype)], dim=2)
        return self.merge(F.scaled_dot_product_attention(q, k, v), tokens)

    def _attend_from_class_token(self, tokens: Tensor) -> Tensor:
        """One query needs no key or value per token: q . (W x) = (W' q) . x, and a mean of W x is W times the mean of x."""
        (weight_q, bias_q), (weight_k, bias_k), (weight_v, bias_v) = self.projections()
        q = self._split(F.linear(tokens[:, :1], weight_q, bias_q))
        by_head_k, by_head_v = (w.unflatten(0, (self.heads, -1)).to(q.dtype) for w in (weight_k, weight_v))
        tokens = tokens.to(q.dtype)
        scores = q @ by_head_k @ tokens[:, None].transpose(-2, -1)
        if bias_k is not None:
            scores = scores + q @ bias_k.view(self.heads, -1, 1).to(q.dtype)
        if self.extra is not None:
            extra_k, extra_v = (x.to(q.dtype) for x in self.extra(tokens[:, 0]))
            scores = torch.cat([scores, q @ extra_k.transpose(-2, -1)], dim=-1)
        attention = (scores * q.shape[-1] ** -0.5).softmax(-1)
        on_tokens, on_extra = attention[..., : tokens.shape[1]], attention[..., tokens.shape[1] :]
        out = on_tokens @ tokens[:, None] @ by_head_v.transpose(-2, -1)
        if bias_v is not None:
            out = out + on_tokens.sum(-1, keepdim=True) * bias_v.view(self.heads, 1, -1).to(q.dtype)
        return out if self.extra is None else out + on_extra @ extra_v

    def _split(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, heads, tokens, head width)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


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


class ClassTokenBlock(nn.Module):
    """The last block for the class token alone, the only token the head reads: next to no work, the same logits."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.inner = block.module
        self.view = block

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        block = self.view
        attended = block.attention(block.norm1(tokens))
        if isinstance(attended, tuple):  # Hugging Face and torchvision return (output, weights)
            attended = attended[0]
        x = tokens[:, :1] + block.scale1(attended)
        return x + block.scale2(block.mlp(block.norm2(x)))


class PromptedBlock(nn.Module):
    """A block with other tokens behind the class token of its input, or fewer in its output."""

    def __init__(self, inner: nn.Module, prompts: nn.Parameter | None, *, replaced: int, dropped: int) -> None:
        super().__init__()
        self.inner = inner
        self.prompts = (prompts,)  # in a tuple it stays the method's parameter, and does not become the model's as well
        self.replaced = replaced  # so many tokens of the input are prompts of an earlier block
        self.dropped = dropped

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (prompts,) = self.prompts
        if prompts is not None:
            rows = prompts.to(tokens.dtype).expand(len(tokens), -1, -1)
            tokens = torch.cat([tokens[:, :1], rows, tokens[:, 1 + self.replaced :]], dim=1)
        out = self.inner(tokens, *args, **kwargs)
        return torch.cat([out[:, :1], out[:, 1 + self.dropped :]], dim=1) if self.dropped else out


class Passage(NamedTuple):
    """What went through a module."""

    entered: Tensor
    left: Any


@contextmanager
def tap(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Passage]]:
    """Inside, what last went through these modules in this thread; other threads pass other samples through the same."""
    seen: dict[nn.Module, Passage] = {}
    here = threading.get_ident()

    def look(module: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:
        if threading.get_ident() == here:
            seen[module] = Passage(args[0], out)

    hooks = [module.register_forward_hook(look) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
