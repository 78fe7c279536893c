"""Digests that identify a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import StateError
from .view import ViT


def fingerprint(vit: ViT, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return digests of the architecture and of the weights of a model. They are the same on every device.

    The digest of the architecture covers names and shapes of the tensors, and properties that these do not show.
    """
    unseen = [vit.family, vit.image_size, vit.class_token_suffices, [block.heads for block in vit.blocks]]
    unseen += [getattr(norm, "eps", None) for norm in vit.norms]
    architecture, weights = hashlib.sha256(f"{unseen}\n".encode()), hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        architecture.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        weights.update(tensor.flatten().view(torch.uint8).numpy().data)
    return {"architecture": architecture.hexdigest()[:16], "weights": weights.hexdigest()[:16]}


def require_same(what: str, theirs: Mapping[str, str], model: nn.Module, mine: Mapping[str, str]) -> None:
    """Refuse a file whose fingerprint is not that of this model. `what` is the beginning of the message."""
    for part, hint in (("architecture", "another architecture"), ("weights", "the same architecture with other weights")):
        if theirs[part] != mine[part]:
            raise StateError(
                f"{what} of another model: a {theirs['class']} with {part} {theirs[part]}, while this "
                f"{type(model).__name__} has {mine[part]} ({hint})."
            )
