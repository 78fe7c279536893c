"""One structural view of a vision transformer, whoever wrote it.

Methods choose what to adapt from this view (`vit.blocks[:9]`, `vit.norms`), never by matching parameter names. What is
special about timm, Hugging Face and torchvision is in `_families.py`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import InputError, ModelError, StateError

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


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


class _ClassTokenBlock(nn.Module):
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


class _PromptedBlock(nn.Module):
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


@dataclass
class Block:
    """One transformer block, `x += scale1(attention(norm1(x)))`, then `x += scale2(mlp(norm2(x)))`."""

    module: nn.Module
    attention_name: str
    open_attention: Callable[[nn.Module, int], OpenAttention]
    heads: int
    norm1: nn.Module
    norm2: nn.Module
    mlp: nn.Module
    scale1: nn.Module = field(default_factory=nn.Identity)
    scale2: nn.Module = field(default_factory=nn.Identity)

    @property
    def attention(self) -> nn.Module:
        return getattr(self.module, self.attention_name)

    @property
    def norms(self) -> list[nn.Module]:
        """Every normalisation layer inside the block, those of the attention included."""
        return [module for module in self.module.modules() if isinstance(module, NORMS)]

    def open(self) -> OpenAttention:
        """Put an `OpenAttention` in the attention's place, or return the one that is there."""
        if not isinstance(self.attention, OpenAttention):
            setattr(self.module, self.attention_name, self.open_attention(self.attention, self.heads))
        attention = self.attention
        assert isinstance(attention, OpenAttention)
        return attention

    def close(self) -> None:
        """Put the original attention module back."""
        if isinstance(self.attention, OpenAttention):
            setattr(self.module, self.attention_name, self.attention.inner)


@dataclass
class ViT:
    """A vision transformer with a class token: where its parts are, and how to run it."""

    model: nn.Module
    family: str
    blocks: list[Block]
    head: nn.Linear
    width: int
    tokens: int  # of an image of the usual size, class token included
    channels: int
    image_size: tuple[int, int] | None  # None: any size the model itself accepts
    class_token_suffices: bool  # for the last block: the head reads no other token, and its attention can be short-cut
    _blocks: nn.Module  # the container, to exchange the last block
    prefix: int = 1  # of the tokens, so many stand before the patches: the class token, and registers if there are any
    _read: bool = False  # whether somebody reads tokens of the last block that the head does not
    _own_head: nn.Linear | None = None  # of the model, while another one is in its place

    @property
    def norms(self) -> list[nn.Module]:
        """Every normalisation layer of the model, in order."""
        return [module for module in self.model.modules() if isinstance(module, NORMS)]

    @property
    def classes(self) -> int:
        return self.head.out_features

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def version(self) -> dict[str, str]:
        """Of the library that the model comes from."""
        package = {"hf": "transformers"}.get(self.family, self.family)
        return {package: metadata.version(package)}

    def logits(self, images: Tensor) -> Tensor:
        out = self.model(images)
        return getattr(out, "logits", out)  # Hugging Face wraps them in an output object

    def check(self, images: Tensor) -> Tensor:
        """The images on the model's device and in its type, or an `InputError` that says what is wrong with them."""
        if not isinstance(images, Tensor):
            raise InputError(f"Images must be a torch.Tensor, not {type(images).__name__}.")
        shape = tuple(images.shape)
        size = self.image_size or ("height", "width")
        expected = f"(batch, {self.channels}, {size[0]}, {size[1]})"
        if images.ndim != 4:
            hint = " Add the batch dimension with images[None]." if images.ndim == 3 else ""
            raise InputError(f"Expected images of shape {expected}, got {shape}.{hint}")
        if not len(images):
            raise InputError(f"The batch is empty: shape {shape}. Pass at least one image.")
        if shape[1] != self.channels or (self.image_size is not None and shape[2:] != self.image_size):
            raise InputError(f"Expected images of shape {expected}, got {shape}. Resize, crop or convert them first.")
        if not images.is_floating_point():
            raise InputError(
                f"Images have the integer type {images.dtype}: convert them to float and normalise as the model expects."
            )
        images = images.detach().to(self.device, self.dtype, non_blocking=True)
        finite = images.isfinite().flatten(1).all(1)
        if not finite.all():
            bad = (~finite).nonzero().flatten().tolist()
            raise InputError(f"NaN or Inf in image {', '.join(map(str, bad[:8]))} of the batch: remove or repair it.")
        return images.clone() if images.is_inference() else images

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the head, (batch, width), and the logits that come out of it."""
        with tap([self.head]) as seen:
            logits = self.logits(images)
        return seen[self.head].entered, logits

    def class_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The class token behind every block, side by side, and the logits.

        Behind a block it is as the next block's first norm leaves it; behind the last one it is what enters the head.
        """
        norms = [block.norm1 for block in self.blocks[1:]]
        with tap([*norms, self.head]) as seen:
            logits = self.logits(images)
        tokens = [seen[norm].left[:, 0] for norm in norms]
        return torch.cat([*tokens, seen[self.head].entered], dim=1), logits

    @property
    def class_tokens_width(self) -> int:
        return (len(self.blocks) - 1) * self.width + self.head.in_features

    @property
    def layers(self) -> list[nn.Module]:
        """The modules that run in the blocks' places: the blocks themselves, or what surgery put around them."""
        return list(self._blocks.children())

    def prompt(self, prompts: Mapping[int, nn.Parameter], *, read: bool = False) -> None:
        """Insert tokens, (count, width), behind the class token of a block's input; call this once, before `shorten`.

        They stay until a block that has its own, and never reach the head. Say `read` if what becomes of them is going to be
        read (`tap` the blocks' modules): then the last block is not shortened.
        """
        self._read = read
        count = 0
        for i, layer in enumerate(self.layers):
            own = prompts.get(i)
            replaced = 0
            if own is not None:
                replaced, count = count, len(own)
            dropped = count if i == len(self.blocks) - 1 else 0
            if own is not None or dropped:
                self._put(i, _PromptedBlock(layer, own, replaced=replaced, dropped=dropped))

    def exchange_head(self, head: nn.Linear) -> None:
        """Classify by another layer of the same shape; call this once."""
        self._own_head = self.head
        self._put_head(head)

    def _put_head(self, head: nn.Linear) -> None:
        for module in self.model.modules():
            for name, child in module.named_children():
                if child is self.head:
                    module._modules[name] = head
        self.head = head

    def shorten(self) -> None:
        """Compute the last block for the class token alone, if that suffices."""
        if self.class_token_suffices and not self._read:
            self.blocks[-1].open().class_only = True
            short = _ClassTokenBlock(self.blocks[-1])
            last = self.layers[-1]
            if isinstance(last, _PromptedBlock):
                last.inner = short
            else:
                self._put(-1, short)

    def restore(self) -> None:
        """Undo all surgery; parameter values are not touched."""
        if self._own_head is not None:
            self._put_head(self._own_head)
            self._own_head = None
        for i, block in enumerate(self.blocks):
            self._put(i, block.module)
            block.close()

    def _put(self, i: int, module: nn.Module) -> None:
        self._blocks._modules[list(self._blocks._modules)[i]] = module


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


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that the modules themselves own, each once; none at all is an error."""
    modules = list(modules)
    found = list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))
    if not found:
        kinds = ", ".join(sorted({type(m).__name__ for m in modules})) or "none"
        raise ModelError(f"Nothing to adapt: no layer with parameters was selected (layers: {kinds}).")
    return found


def samples_interact(model: nn.Module) -> bool:
    """Whether one sample's output depends on the rest of its batch, as with BatchNorm on batch statistics."""
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def fingerprint(vit: ViT, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests of an architecture (names, shapes and what these do not show) and of its weights, equal on every device."""
    unseen = [vit.family, vit.image_size, vit.class_token_suffices, [block.heads for block in vit.blocks]]
    unseen += [getattr(norm, "eps", None) for norm in vit.norms]
    architecture, weights = hashlib.sha256(f"{unseen}\n".encode()), hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        architecture.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        weights.update(tensor.flatten().view(torch.uint8).numpy().data)
    return {"architecture": architecture.hexdigest()[:16], "weights": weights.hexdigest()[:16]}


def require_same(what: str, theirs: Mapping[str, str], model: nn.Module, mine: Mapping[str, str]) -> None:
    """Refuse a file whose fingerprint is not this model's; `what` begins the message."""
    for part, hint in (("architecture", "another architecture"), ("weights", "the same architecture with other weights")):
        if theirs[part] != mine[part]:
            raise StateError(
                f"{what} of another model: a {theirs['class']} with {part} {theirs[part]}, while this "
                f"{type(model).__name__} has {mine[part]} ({hint})."
            )


def view(model: nn.Module) -> ViT:
    """The structural view of `model`, or a `ModelError` that says what is missing."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"adapt() takes a torch.nn.Module, not {type(model).__name__}.")
    from ._families import FAMILIES

    for family in FAMILIES:
        found = family(model)
        if found is not None:
            require(model, len(found.blocks) > 0, "it has no transformer blocks")
            require(model, isinstance(found.head, nn.Linear), "its head is not a linear layer (num_classes=0?)")
            require(model, not any(p.is_inference() for p in model.parameters()), "it was built in inference mode")
            return found
    raise ModelError(
        f"{_name(model)} is not a vision transformer that acclimate understands: no class token and blocks with "
        "self-attention were found. Supported: timm VisionTransformer (ViT, DeiT), transformers "
        "ViTForImageClassification, torchvision VisionTransformer."
    )


def _name(model: nn.Module) -> str:
    return f"{type(model).__module__.split('.')[0]} {type(model).__name__}"


def require(model: nn.Module, condition: bool, what: str) -> None:
    """Raise the error of a model that cannot be adapted."""
    if not condition:
        raise ModelError(f"{_name(model)} cannot be adapted: {what}.")
