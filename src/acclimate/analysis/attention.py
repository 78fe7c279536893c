"""Attention weights of any supported model, as it is or as a method has adapted it: how far they reach, where they lead.

The weights of a block are (batch, heads, tokens, keys). Among the tokens the class token is first, then come the prompts
that a method may have inserted, then registers if the model has them, and last the patches; behind these, among the keys
alone, stands what a method added there, as DCT its conditioner. Prompts and added keys are no part of the model: here they
are called `added`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.adapter import Adapter
from ..errors import ConfigError, ModelError, require_between
from ..models.families import view_of
from ..models.surgery import OpenAttention
from ..models.view import PARTS, ModelView, require_supported

AT_ONCE = 2**25  # queries, in numbers, that are held at once; with the keys, a quarter of a gigabyte
ADDED = ("dropped", "class")


def attention_maps(model: nn.Module, images: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Return number and attention weights, (batch, heads, tokens, keys), of every block for one batch, in order.

    The model runs as ever, and the weights are made anew from the queries and keys that it had; an adapter is used frozen.
    Of the last block, too, which an adapter computes for the class token alone, they are those of all tokens. Each block's
    weights are made when their turn comes; a caller that keeps none of them has one block's in memory.

    Args:
        model: A model in evaluation mode, or an adapter.
        images: A batch as the model takes it; `in_parts` cuts many images into such batches.
    """
    view = vit_of(model)
    seen: dict[int, tuple[Tensor, Tensor, float | Tensor]] = {}
    here = threading.get_ident()

    def noting(i: int, opened: OpenAttention) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(_: nn.Module, entered: tuple[Tensor, ...]) -> None:
            if threading.get_ident() == here:  # other threads pass other images
                # now, not later: a teacher's weights are in the model during the pass alone
                seen[i] = _queries_and_keys(opened, entered[0])

        return note

    hooks = [block.attention.register_forward_pre_hook(noting(i, block.opened())) for i, block in enumerate(view.blocks)]
    try:
        with torch.no_grad(), passing(model) as run:
            run(images)
    finally:
        for hook in hooks:
            hook.remove()
    return ((i, _weights(*seen.pop(i))) for i in range(len(view.blocks)))


def vit_of(model: nn.Module) -> ModelView:
    """Return the view of a model, or of that in an adapter."""
    found = model.engine.view if isinstance(model, Adapter) else view_of(model)
    require_supported(found.model, bool(found.blocks), f"this figure needs {PARTS['blocks']}")
    return found


@contextmanager
def passing(model: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Provide a function that passes a batch through a model or an adapter, whole and seen by hooks; neither changes."""
    if isinstance(model, Adapter):
        with model.frozen(), model.engine.undivided():
            yield model
    else:
        view = view_of(model)
        yield lambda images: view.logits(view.check(images))


def _queries_and_keys(attention: OpenAttention, tokens: Tensor) -> tuple[Tensor, Tensor, float | Tensor]:
    q, k, _ = attention.project(tokens)
    if attention.extra is not None:
        k = torch.cat([k, attention.extra(tokens[:, 0])[0].to(k.dtype)], dim=2)
    precise = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if attention.scale is None else attention.scale
    return q.to(precise), k.to(precise), scale


def _weights(q: Tensor, k: Tensor, scale: float | Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * scale).softmax(-1)


def in_parts(model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
    """Return images in batches for which `attention_maps` needs a bounded amount of memory."""
    view = vit_of(model)
    return images.split(max(1, min(64, AT_ONCE // (len(view.blocks) * view.tokens * view.width))))


@dataclass(frozen=True)
class Layout:
    """How a model's tokens lie over an image.

    Args:
        tokens: Those of the model itself: class token, registers, patches.
        rows: Of patches.
        columns: Of patches.
        patch: Side of a patch in pixels.
    """

    tokens: int
    rows: int
    columns: int
    patch: int

    @classmethod
    def of(cls, model: nn.Module, images: Tensor) -> Layout:
        """Return the layout of a model or an adapter over images of this size, which has to be the model's own."""
        view = vit_of(model)
        height, width = images.shape[-2:]
        patches = view.tokens - view.prefix
        # from the large ones down: what the last column leaves over is less than a patch
        for side in range(min(height, width), 0, -1):
            if (height // side) * (width // side) == patches:
                return cls(view.tokens, height // side, width // side, side)
        raise ModelError(
            f"{patches} patches are no grid of squares over an image of {height} x {width} pixels: give images of the "
            "model's own size, and a model with square patches."
        )

    @property
    def patches(self) -> int:
        """Return the number of patches."""
        return self.rows * self.columns

    def distances(self) -> Tensor:
        """Return the pixels between the centres of any two patches, (patches, patches), in float64."""
        places = torch.cartesian_prod(torch.arange(self.rows), torch.arange(self.columns)).double()
        return self.patch * (places[:, None] - places).square().sum(-1).sqrt()


class Reach(NamedTuple):
    """How far attention looks from the patches, for each head: (batch, heads) each.

    With an added key, less attention is left for the patches, and `distance` and `total` shrink even if the patches share
    what is left as before. `renormalised` does not.
    """

    distance: Tensor  # pixels: mean over patches i of sum_j A_ij D_ij, over patches j
    renormalised: Tensor  # the same, where the weights of each patch on all patches are divided by their sum
    total: Tensor  # sum over i instead of the mean, as the DCT paper has it
    on_patches: Tensor  # attention that patches pay to patches
    on_added: Tensor  # attention that they pay to prompts and added keys


def reach(attention: Tensor, layout: Layout) -> Reach:
    """Return how far attention looks; the class token, and what else is no patch, is left out as query and as key."""
    plain = query_distances(attention, layout)
    tokens = attention.shape[-2]
    from_patches = attention[..., tokens - layout.patches :, :]
    prompts = from_patches[..., 1 : 1 + tokens - layout.tokens]
    return Reach(
        plain.mean(-1),
        query_distances(attention, layout, renormalised=True).mean(-1),
        plain.sum(-1),
        _between_patches(attention, layout).sum(-1).mean(-1),
        (prompts.sum(-1) + from_patches[..., tokens:].sum(-1)).mean(-1),
    )


def query_distances(attention: Tensor, layout: Layout, *, renormalised: bool = False) -> Tensor:
    """Return how far every patch looks, in pixels: (batch, heads, patches)."""
    weights = _between_patches(attention, layout)
    distances = (weights * layout.distances().to(weights)).sum(-1)
    # a patch may look at the class token alone
    return distances / weights.sum(-1).clamp_min(torch.finfo(weights.dtype).tiny) if renormalised else distances


def _between_patches(attention: Tensor, layout: Layout) -> Tensor:
    tokens = attention.shape[-2]
    patches = slice(tokens - layout.patches, tokens)
    return attention[..., patches, patches]


def rollouts(maps: Iterable[Tensor], layout: Layout, *, residual: float = 0.5, added: str = "dropped") -> Iterator[Tensor]:
    """Return how much of each token of the input is in each token behind a block, for each block.

    This is attention rollout (Abnar and Zuidema, ACL 2020). Heads are averaged, a part is given to the token itself for the
    residual connection, and the matrices are multiplied from the first block on. What is yielded is (batch, tokens, tokens),
    over the model's own tokens; rows sum to 1.

    Args:
        maps: Attention weights of the blocks, in order.
        layout: Of the tokens.
        residual: Share of the residual connection.
        added: What becomes of the attention to added keys: "dropped", so that the others have its share in proportion, or
            given to the "class" token, which a conditioner is made from.
    """
    require_between(0, 1, residual=residual)
    if added not in ADDED:
        raise ConfigError(f"added={added!r}: choose one of {', '.join(ADDED)}.")
    product: Tensor | None = None
    for attention in maps:
        own = _among_own(attention, layout, added).mean(-3)
        step = (1 - residual) * own + residual * torch.eye(layout.tokens, dtype=own.dtype, device=own.device)
        product = step if product is None else step @ product
        yield product


def rollout_maps(maps: Iterable[Tensor], layout: Layout, *, residual: float = 0.5, added: str = "dropped") -> Tensor:
    """Return how much of each patch arrives in the class token behind the last block, (batch, rows, columns)."""
    for product in rollouts(maps, layout, residual=residual, added=added):
        last = product
    return last[..., 0, -layout.patches :].unflatten(-1, (layout.rows, layout.columns))


def _among_own(attention: Tensor, layout: Layout, added: str) -> Tensor:
    """Return the weights of the model's own tokens on each other, which again sum to 1."""
    tokens = attention.shape[-2]
    own = torch.tensor([0, *range(1 + tokens - layout.tokens, tokens)], device=attention.device)
    kept = attention[..., own, :][..., own]
    if added == "dropped":
        return kept / kept.sum(-1, keepdim=True)
    lost = attention[..., own, :].sum(-1) - kept.sum(-1)
    return torch.cat([kept[..., :1] + lost[..., None], kept[..., 1:]], dim=-1)
