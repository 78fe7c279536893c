"""One structural view of a vision transformer, whoever wrote it.

Methods choose what to adapt from this view (`vit.blocks[:9]`, `vit.norms`), never by matching parameter names. A family
(timm, Hugging Face, torchvision) is one function that finds the parts and one class that opens its attention.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import ModelError

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


class _FusedAttention(OpenAttention):
    """Families that keep the three projections in one (3 width, width) matrix."""

    def fused(self) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = F.linear(tokens, *self.fused()).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return q, k, v

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        weight, bias = self.fused()
        return list(zip(weight.chunk(3), (None, None, None) if bias is None else bias.chunk(3)))


class _TimmAttention(_FusedAttention):
    def fused(self) -> tuple[Tensor, Tensor | None]:
        inner: Any = self.inner
        return inner.qkv.weight, inner.qkv.bias

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner: Any = self.inner
        q, k, v = super().project(tokens)
        return inner.q_norm(q), inner.k_norm(k), v

    def merge(self, heads: Tensor, tokens: Tensor) -> Tensor:
        inner: Any = self.inner
        out = inner.norm(heads.transpose(1, 2).flatten(2))
        if getattr(inner, "gate", None) is not None:
            out = out * inner.gate(tokens).sigmoid()
        return inner.proj(out)


class _HuggingFaceAttention(OpenAttention):
    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._split(F.linear(tokens, weight, bias)) for weight, bias in self.projections())
        return q, k, v

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        inner: Any = self.inner
        return [(p.weight, p.bias) for p in (inner.q_proj, inner.k_proj, inner.v_proj)]

    def merge(self, heads: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        inner: Any = self.inner
        return inner.o_proj(heads.transpose(1, 2).flatten(2)), None


class _TorchvisionAttention(_FusedAttention):
    def fused(self) -> tuple[Tensor, Tensor | None]:
        inner: Any = self.inner
        return inner.in_proj_weight, inner.in_proj_bias

    def merge(self, heads: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
        inner: Any = self.inner
        return inner.out_proj(heads.transpose(1, 2).flatten(2)), None


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
    channels: int
    image_size: tuple[int, int] | None  # None: any size the model itself accepts
    class_token_suffices: bool  # for the last block: the head reads no other token, and its attention can be short-cut
    _blocks: nn.Module  # the container, to exchange the last block

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

    def logits(self, images: Tensor) -> Tensor:
        out = self.model(images)
        return getattr(out, "logits", out)  # Hugging Face wraps them in an output object

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the head, (batch, width), and the logits that come out of it."""
        seen: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            logits = self.logits(images)
        finally:
            hook.remove()
        return seen[0], logits

    def shorten(self) -> None:
        """Compute the last block for the class token alone, if that suffices."""
        if self.class_token_suffices:
            self.blocks[-1].open().class_only = True
            _set_last(self._blocks, _ClassTokenBlock(self.blocks[-1]))

    def restore(self) -> None:
        """Undo all surgery; parameter values are not touched."""
        _set_last(self._blocks, self.blocks[-1].module)
        for block in self.blocks:
            block.close()


def _set_last(container: nn.Module, module: nn.Module) -> None:
    name = list(container._modules)[-1]
    container._modules[name] = module


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


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digests of an architecture (names, shapes, types) and of its weights, equal on every device."""
    architecture, weights = hashlib.sha256(), hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        architecture.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        weights.update(tensor.flatten().view(torch.uint8).numpy().data)
    return {"architecture": architecture.hexdigest()[:16], "weights": weights.hexdigest()[:16]}


def view(model: nn.Module) -> ViT:
    """The structural view of `model`, or a `ModelError` that says what is missing."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"adapt() takes a torch.nn.Module, not {type(model).__name__}.")
    for family in (_timm, _hugging_face, _torchvision):
        found = family(model)
        if found is not None:
            _require(model, len(found.blocks) > 0, "it has no transformer blocks")
            _require(model, isinstance(found.head, nn.Linear), "its head is not a linear layer (num_classes=0?)")
            _require(model, not any(p.is_inference() for p in model.parameters()), "it was built in inference mode")
            return found
    raise ModelError(
        f"{_name(model)} is not a vision transformer that acclimate understands: no class token and blocks with "
        "self-attention were found. Supported: timm VisionTransformer (ViT, DeiT), transformers "
        "ViTForImageClassification, torchvision VisionTransformer."
    )


def _name(model: nn.Module) -> str:
    return f"{type(model).__module__.split('.')[0]} {type(model).__name__}"


def _require(model: nn.Module, condition: bool, what: str) -> None:
    if not condition:
        raise ModelError(f"{_name(model)} cannot be adapted: {what}.")


def _timm(model: Any) -> ViT | None:
    from timm.models.vision_transformer import Attention, VisionTransformer
    from timm.models.vision_transformer import Block as TimmBlock

    if not isinstance(model, VisionTransformer):
        return None
    _require(model, model.cls_token is not None, "it has no class token, which domain conditioners are made from")
    _require(model, not hasattr(model, "head_dist"), "its head reads a distillation token beside the class token")

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(model.blocks):
            _require(model, type(b) is TimmBlock, f"block {i} is a {type(b).__name__}, not a plain Block")
            _require(model, type(b.attn) is Attention, f"the attention of block {i}, {type(b.attn).__name__}, is unknown")
            yield Block(b, "attn", _TimmAttention, b.attn.num_heads, b.norm1, b.norm2, b.mlp, b.ls1, b.ls2)

    # a norm on queries or keys stands between the projection and the product that the short cut exchanges
    plain = all(isinstance(b.attn.q_norm, nn.Identity) and isinstance(b.attn.k_norm, nn.Identity) for b in model.blocks)
    fixed = getattr(model.patch_embed, "strict_img_size", True) and not model.dynamic_img_size
    return ViT(
        model=model,
        family="timm",
        blocks=list(blocks()),
        head=model.head,
        width=model.embed_dim,
        channels=model.in_chans,
        image_size=tuple(model.patch_embed.img_size) if fixed else None,
        class_token_suffices=plain and model.global_pool == "token",
        _blocks=model.blocks,
    )


def _hugging_face(model: Any) -> ViT | None:
    # whoever holds such a model has imported its module: no need to import it for everybody else
    module = sys.modules.get("transformers.models.vit.modeling_vit")
    if module is None or not isinstance(model, module.ViTForImageClassification):
        return None
    _require(model, hasattr(model.vit, "layers"), "its layout is that of transformers before 5.10; upgrade transformers")
    layers = model.vit.layers

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(layers):
            kind = type(b.attention)
            _require(model, kind is module.ViTAttention, f"the attention of layer {i}, {kind.__name__}, is unknown")
            yield Block(
                b,
                "attention",
                _HuggingFaceAttention,
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
        channels=model.config.num_channels,
        image_size=tuple(model.vit.embeddings.image_size),
        class_token_suffices=True,
        _blocks=layers,
    )


def _torchvision(model: Any) -> ViT | None:
    module = sys.modules.get("torchvision.models.vision_transformer")
    if module is None or not isinstance(model, module.VisionTransformer):
        return None

    def blocks() -> Iterator[Block]:
        for i, b in enumerate(model.encoder.layers):
            attention = b.self_attention
            plain = type(attention) is nn.MultiheadAttention and attention.in_proj_weight is not None
            _require(model, plain and attention.bias_k is None and not attention.add_zero_attn,
                     f"the attention of layer {i} is not a plain MultiheadAttention")  # fmt: skip
            yield Block(b, "self_attention", _TorchvisionAttention, attention.num_heads, b.ln_1, b.ln_2, b.mlp)

    conv = next((m for m in model.conv_proj.modules() if isinstance(m, nn.Conv2d)), None)
    return ViT(
        model=model,
        family="torchvision",
        blocks=list(blocks()),
        head=model.heads[-1],
        width=model.hidden_dim,
        channels=conv.in_channels if conv is not None else 3,
        image_size=(model.image_size, model.image_size),
        class_token_suffices=True,
        _blocks=model.encoder.layers,
    )
