"""Digests that identify a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StateError
from .view import ModelView


def fingerprint(view: ModelView, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the architecture and of the weights of a model. They are the same on every device.

    The digest of the architecture covers names and shapes of the tensors, and properties that these do not show. The state
    of a quantised layer contains other values as well, for example a tuple of weight and bias.
    """
    unseen = [view.family, view.image_size, view.class_token_suffices, [block.heads for block in view.blocks]]
    unseen += [getattr(norm, "eps", None) for norm in view.norms]
    architecture, weights = hashlib.sha256(f"{unseen}\n".encode()), hashlib.sha256()
    for name in sorted(tensors):
        for part in _parts(tensors[name]):
            if isinstance(part, Tensor):
                tensor = part.detach().cpu().contiguous()
                architecture.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
                weights.update(tensor.flatten().view(torch.uint8).numpy().data)
            else:
                architecture.update(f"{name} {part}\n".encode())
    return {"architecture": architecture.hexdigest()[:16], "weights": weights.hexdigest()[:16]}


def _parts(value: Any) -> Iterator[Tensor | str]:
    """Yield the dense tensors that a value of a state dictionary consists of, and a text for what is no tensor."""
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _parts(each)
    elif isinstance(value, Tensor) and value.is_quantized:
        each_channel = value.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
        scale = value.q_per_channel_scales() if each_channel else torch.tensor(value.q_scale())
        zero = value.q_per_channel_zero_points() if each_channel else torch.tensor(value.q_zero_point())
        yield from (value.int_repr(), scale, zero)
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):  # a subclass that is made of other tensors
        for name in value.__tensor_flatten__()[0]:
            yield from _parts(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
    else:
        yield str(value) if isinstance(value, (str, int, float, torch.dtype, type(None))) else type(value).__name__


def require_same(what: str, theirs: Mapping[str, str], model: nn.Module, mine: Mapping[str, str]) -> None:
    """Refuse a file whose fingerprint is not that of this model. `what` is the beginning of the message."""
    for part, hint in (("architecture", "another architecture"), ("weights", "the same architecture with other weights")):
        if theirs[part] != mine[part]:
            raise StateError(
                f"{what} of another model: a {theirs['class']} with {part} {theirs[part]}, while this "
                f"{type(model).__name__} has {mine[part]} ({hint})."
            )
