"""Modules that are inserted into a model while it adapts: open attention, a short last block, prompts, norms with offsets.

Each module replaces one module of the model, keeps it as `inner`, and does not change its parameters. What a user has
changed in the model acts as before: submodules are called, and a short cut is taken only where modules are plain (`plain`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from .plain import ours

if TYPE_CHECKING:
    from .view import ModelView


class OpenAttention(nn.Module):
    """The self-attention of a block, with access to what is between its projections and its output.

    Until `condition` is called, the attention runs as it is. The class token's output can also be computed alone.
    """

    def __init__(self, inner: nn.Module, heads: int) -> None:
        super().__init__()
        self.inner = inner
        self.heads = heads
        self.extra: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self.after: int | None = None
        self.forward_of_instance: Callable[..., Any] | None = None  # of a user, put back by `close`

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, tokens, head width)."""
        raise NotImplementedError

    @property
    def scale(self) -> float | Tensor | None:
        """The factor of the products of queries and keys, or None for the usual one, head width ** -0.5."""
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attended values, (batch, heads, tokens, head width)."""
        scale = self.scale
        if isinstance(scale, Tensor):
            q, scale = q * scale, 1.0
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    def merge(self, heads: Tensor, tokens: Tensor) -> Any:
        """Return what the family's attention module returns, given the attended values.

        The attended values are (batch, heads, tokens, head width).
        """
        raise NotImplementedError

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight, (width, width), and bias of the projections to queries, keys and values.

        They are what acts only if these projections are plain linear layers.
        """
        raise NotImplementedError

    def is_product(self) -> bool:
        """Return whether scores are plain products of linear projections with the usual scale.

        The modules inside are known to be plain.
        """
        return self.scale is None and all(_is_dense(weight) for weight, _ in self.projections())

    def condition(self, extra: Callable[[Tensor], tuple[Tensor, Tensor]], *, after: int | None = None) -> None:
        """Let the tokens attend to further keys and values, which have no output and no position of their own.

        The module runs other code then, but it is called as ever, so that its hooks act.

        Args:
            extra: A function from the class token, (batch, width), to keys and values, each (batch, heads, count, head
                width).
            after: If it is given, the function gets the mean of the tokens after so many first ones in place of the class
                token.
        """
        self.extra = extra
        self.after = after
        self.inner.forward = self._conditioned

    def _extra(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the further keys and values."""
        assert self.extra is not None
        return self.extra(tokens[:, 0] if self.after is None else tokens[:, self.after :].mean(1))

    def close(self) -> None:
        """Let the attention run as it is again."""
        self.extra = None
        if hasattr(vars(self.inner).get("forward"), "ours"):  # it may be a user's
            del self.inner.forward

    def forward(self, tokens: Tensor, *args: Any, class_only: bool = False, **kwargs: Any) -> Any:
        """Return the output of self-attention, or with `class_only` that of the class token."""
        if class_only:
            return self.merge(self._attend_from_class_token(tokens), tokens[:, :1])
        return self.inner(tokens, *args, **kwargs)

    @ours
    def _conditioned(self, tokens: Tensor, *args: Any, is_causal: bool = False, **kwargs: Any) -> Any:
        """Return the output of self-attention with the extra keys and values."""
        if is_causal or any(isinstance(a, Tensor) and a is not tokens for a in (*args, *kwargs.values())):
            raise ModelError(
                f"{type(self.inner).__name__} was called with a mask, or with keys that are not its queries, which domain "
                "conditioners do not support: choose another method, or leave this block out (blocks=)."
            )
        q, k, v = self.project(tokens)
        extra_k, extra_v = self._extra(tokens)
        k = torch.cat([k, extra_k.to(k.dtype)], dim=2)
        v = torch.cat([v, extra_v.to(v.dtype)], dim=2)
        return self.merge(self.attend(q, k, v), tokens)

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
            extra_k, extra_v = (x.to(q.dtype) for x in self._extra(tokens))
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

    def project_fused(self, tokens: Tensor) -> Tensor:
        """Return the output of the fused projection, (batch, tokens, 3 width)."""
        return F.linear(tokens, *self.fused())

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, tokens, head width)."""
        q, k, v = self.project_fused(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return q, k, v

    def is_product(self) -> bool:
        """Return whether scores are plain products of linear projections with the usual scale."""
        return self.scale is None and _is_dense(self.fused()[0])

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of the projections to queries, keys and values."""
        weight, bias = self.fused()
        return list(zip(weight.chunk(3), (None, None, None) if bias is None else bias.chunk(3)))


class TracedAttention(OpenAttention):
    """The attention of a model of which only a trace is known. It runs its own code, and only its product is extended.

    The further key comes after whatever the module does to queries and keys. It has neither a rotary position nor a relative
    position bias.
    """

    def __init__(self, inner: nn.Module, heads: int) -> None:
        super().__init__(inner, heads)
        self.own_forward: Callable[..., Any] = inner.forward
        self.forward_of_instance = vars(inner).get("forward")

    def close(self) -> None:
        """Let the attention run as it is again."""
        super().close()
        if self.forward_of_instance is not None:
            self.inner.forward = self.forward_of_instance

    @ours
    def _conditioned(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of self-attention with the extra keys and values."""
        tokens = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        with _Appending(*self._extra(tokens)) as appending:
            out = self.own_forward(*args, **kwargs)
        if appending.calls != 1:
            raise ModelError(
                f"{type(self.inner).__name__} does not compute its attention by torch's scaled_dot_product_attention, so "
                "that no key can be added: let it do so (timm.layers.set_fused_attn(True), "
                'attn_implementation="sdpa"), or choose another method.'
            )
        return out


ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # of scaled_dot_product_attention


class _Appending(TorchFunctionMode):
    """Append keys and values in every call of `scaled_dot_product_attention`."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.k, self.v = k, v
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        given = {**dict(zip(ARGUMENTS, args)), **(kwargs or {})}
        bias = given.get("attn_mask")
        if bias is not None:
            given["attn_mask"] = F.pad(bias, (0, self.k.shape[2]), value=bias.dtype is torch.bool)
        for name, more in (("key", self.k), ("value", self.v)):
            given[name] = torch.cat([given[name], more.to(given[name].dtype)], dim=2)
        return func(**given)


def unusual_scale(scale: float | Tensor, head_width: int) -> float | Tensor | None:
    """Return the factor of the products of queries and keys, or None if it is the usual one."""
    return scale if isinstance(scale, Tensor) or scale != head_width**-0.5 else None


def _is_dense(weight: object) -> bool:
    """Return whether a weight is an ordinary tensor, and not one of a subclass, which may be quantised or distributed."""
    return type(weight) in (Tensor, nn.Parameter)


class ClassTokenBlock(nn.Module):
    """The last block, computed for the class token only.

    The head reads no other token, so that the logits are the same at much lower cost. If the block, or what follows it, is
    not plain (`ModelView.ends_plainly`), the block runs as it is.
    """

    def __init__(self, view: ModelView) -> None:
        super().__init__()
        self.inner = view.blocks[-1].module
        self.view = view
        self._plain_at_first = view.ends_plainly()

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the class token after the block, (batch, 1, width), or all tokens if the block has to run as it is."""
        # a compiled pass keeps what it once found, as it keeps the hooks that it found
        plain = self._plain_at_first if torch.compiler.is_compiling() else self.view.ends_plainly()
        if not plain or any(a is not None for a in (*args, *kwargs.values())):
            return self.inner(tokens, *args, **kwargs)
        block = self.view.blocks[-1]
        attended = block.attention(block.norm1(tokens), class_only=True)
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


class OffsetNorm(nn.Module):
    """A LayerNorm whose scale and shift have an offset for each sample.

    `offsets` maps the input of the layer to the offsets of scale and shift, in a shape that fits the input.
    """

    def __init__(self, inner: nn.LayerNorm, offsets: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.inner = inner
        self.offsets = offsets

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input with the new scale and shift."""
        scale, shift = self.offsets(x)
        return self.inner(x) + F.layer_norm(x, self.inner.normalized_shape, eps=self.inner.eps) * scale + shift


class MixedStatistics:
    """A hook that lets a BatchNorm normalise with a mixture of the statistics of the source data and of the batch.

    Args:
        prior: The number of images that the statistics of the source count as.
        images: The number of images that the batch counts as. Default: as many as it has.
    """

    ours = True

    def __init__(self, prior: float, images: int | None = None) -> None:
        self.prior = prior
        self.images = images

    def __call__(self, norm: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Return what the layer has to get."""
        count = self.images or len(args[0])
        return normalised_with(
            norm, args[0], *mixed(norm.running_mean, norm.running_var, args[0], count / (count + self.prior))
        )


class MovingStatistics(nn.Module):
    """A hook that lets a BatchNorm normalise with statistics that begin with those of the source, and can follow batches.

    Args:
        norm: The layer.
        rate: The share of a batch in the statistics, when they follow it.
    """

    ours = True

    def __init__(self, norm: Any, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.follows = False  # whether the statistics move to each batch that is passed
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", norm.running_mean.detach().clone())
        self.register_buffer("variance", norm.running_var.detach().clone())
        self.ranges = {"variance": (0, math.inf)}

    def forward(self, norm: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Return what the layer has to get, after the statistics have followed if they do."""
        if self.follows:
            with torch.no_grad():
                mean, variance = mixed(self.mean, self.variance, args[0], self.rate)
                self.mean.copy_(mean)
                self.variance.copy_(variance)
        return normalised_with(norm, args[0], self.mean, self.variance)


def mixed(mean: Tensor, variance: Tensor, x: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return statistics of which those of the channels of `x` have a share."""
    new_variance, new_mean = torch.var_mean(x.to(mean.dtype), dim=[d for d in range(x.ndim) if d != 1], correction=0)
    return mean.lerp(new_mean, share), variance.lerp(new_variance, share)


def normalised_with(norm: Any, x: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor]:
    """Return the input with which a BatchNorm in evaluation mode returns what it would with other statistics.

    The layer itself still runs, with the statistics of the source: they are undone in advance.
    """
    scale = ((norm.running_var + norm.eps) / (variance + norm.eps)).sqrt()
    shift = norm.running_mean - mean * scale
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    return ((x.to(scale.dtype) * scale.view(shape) + shift.view(shape)).to(x.dtype),)


STATISTICS = (MixedStatistics, MovingStatistics)  # hooks that stay as long as a model is wrapped

SURGERY: frozenset[type] = frozenset({ClassTokenBlock, PromptedBlock})


class Captured(NamedTuple):
    """The input and the output of a module."""

    inputs: Tensor
    outputs: Any


@contextmanager
def capture(modules: Iterable[nn.Module], *, first: bool = False) -> Iterator[dict[nn.Module, Captured]]:
    """Let the block read the latest inputs and outputs of these modules, or the first ones, in a dictionary by module.

    Inputs are taken before other hooks can change them, and outputs after that. Only passes in this thread are stored,
    because other threads pass other samples through the same modules.
    """
    seen: dict[nn.Module, Captured] = {}
    entered: dict[nn.Module, Tensor] = {}
    here = threading.get_ident()

    @ours
    def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if threading.get_ident() == here:
            entered[module] = args[0]

    @ours
    def after(module: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:
        if threading.get_ident() == here:
            now = Captured(entered.pop(module), out)
            seen[module] = seen.get(module, now) if first else now

    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(before, prepend=True))
            handles.append(module.register_forward_hook(after))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def selecting(module: nn.Module, positions: Tensor) -> Iterator[None]:
    """Let a module get only the tokens at these positions, (batch, count), of each sample inside the block.

    Only passes in this thread are changed.
    """
    here = threading.get_ident()

    @ours
    def select(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if threading.get_ident() != here:
            return None
        tokens, *others = args
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        return tokens[rows, positions], *others

    handle = module.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def remove_captures(model: nn.Module) -> None:
    """Remove the hooks that an interrupted `capture` or `selecting` left on the modules of a model."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hasattr(hook, "ours") and not isinstance(hook, STATISTICS)]:
                del hooks[key]
