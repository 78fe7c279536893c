"""Modules that are inserted into a model while it adapts: opened attention, a short last block, and prompt tokens.

Each module replaces one module of the model, keeps it as `inner`, and does not change its parameters.
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
    """The self-attention of a block, with access to what is between its projections and its output.

    `extra` maps the class token, (batch, width), to further keys and values, each (batch, heads, count, head width). The
    tokens attend to these, but they have no output of their own. With `class_only`, only the output of the class token is
    computed.
    """

    def __init__(self, inner: nn.Module, heads: int) -> None:
        super().__init__()
        self.inner = inner
        self.heads = heads
        self.extra: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self.class_only = False

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, tokens, head width)."""
        raise NotImplementedError

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight, (width, width), and bias of the projections to queries, keys and values."""
        raise NotImplementedError

    def merge(self, heads: Tensor, tokens: Tensor) -> Any:
        """Return what the family's attention module returns, given the attended values.

        The attended values are (batch, heads, tokens, head width).
        """
        raise NotImplementedError

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Any:
        """Return the output of self-attention, with the extra keys and values if there are any."""
        if self.class_only:
            return self.merge(self._attend_from_class_token(tokens), tokens[:, :1])
        q, k, v = self.project(tokens)
        if self.extra is not None:
            extra_k, extra_v = self.extra(tokens[:, 0])
            k = torch.cat([k, extra_k.to(k.dtype)], dim=2)
            v = torch.cat([v, extra_v.to(v.dtype)], dim=2)
        return self.merge(F.scaled_dot_product_attention(q, k, v), tokens)

    def _attend_from_class_token(self, tokens: Tensor) -> Tensor:
        """Return the attended values of the class token.

        A single query needs no projection of every token to a key and a value: q . (W x) = (W' q) . x, and the weighted mean
        of W x is W times the weighted mean of x.
        """
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
        """Reshape (batch, tokens, width) to (batch, heads, tokens, head width)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FusedAttention(OpenAttention):
    """The opened attention of families whose three projections are one (3 width, width) matrix."""

    def fused(self) -> tuple[Tensor, Tensor | None]:
        """Return weight, (3 width, width), and bias of the fused projection."""
        raise NotImplementedError

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, tokens, head width)."""
        q, k, v = F.linear(tokens, *self.fused()).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return q, k, v

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of the projections to queries, keys and values."""
        weight, bias = self.fused()
        return list(zip(weight.chunk(3), (None, None, None) if bias is None else bias.chunk(3)))


class ClassTokenBlock(nn.Module):
    """The last block, computed for the class token only.

    The head reads no other token, so that the logits are the same at much lower cost.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.inner = block.module
        self.view = block

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the class token after the block, (batch, 1, width)."""
        block = self.view
        attended = block.attention(block.norm1(tokens))
        if isinstance(attended, tuple):  # Hugging Face and torchvision return (output, weights)
            attended = attended[0]
        x = tokens[:, :1] + block.scale1(attended)
        return x + block.scale2(block.mlp(block.norm2(x)))


class PromptedBlock(nn.Module):
    """A block that inserts prompts after the class token of its input, and may drop prompts from its output."""

    def __init__(self, inner: nn.Module, prompts: nn.Parameter | None, *, replaced: int, dropped: int) -> None:
        super().__init__()
        self.inner = inner
        self.prompts = (prompts,)  # in a tuple, so that it is not registered as a parameter of the model
        self.replaced = replaced  # number of prompts of an earlier block in the input
        self.dropped = dropped

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tokens after the block."""
        (prompts,) = self.prompts
        if prompts is not None:
            rows = prompts.to(tokens.dtype).expand(len(tokens), -1, -1)
            tokens = torch.cat([tokens[:, :1], rows, tokens[:, 1 + self.replaced :]], dim=1)
        out = self.inner(tokens, *args, **kwargs)
        return torch.cat([out[:, :1], out[:, 1 + self.dropped :]], dim=1) if self.dropped else out


class Captured(NamedTuple):
    """The input and the output of a module."""

    inputs: Tensor
    outputs: Any


@contextmanager
def capture(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Captured]]:
    """Let the block read the latest inputs and outputs of these modules, in a dictionary by module.

    Only passes in this thread are stored, because other threads pass other samples through the same modules.
    """
    look = _Capture()
    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_hook(look))
        yield look.found
    finally:
        for handle in handles:
            handle.remove()


class _Capture:
    """A forward hook that stores the latest inputs and outputs of modules, of one thread only."""

    def __init__(self) -> None:
        self.found: dict[nn.Module, Captured] = {}
        self._thread = threading.get_ident()

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:
        if threading.get_ident() == self._thread:
            self.found[module] = Captured(args[0], out)


def remove_captures(model: nn.Module) -> None:
    """Remove the hooks that an interrupted `capture` left on the modules of a model."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, _Capture):
                del module._forward_hooks[key]
