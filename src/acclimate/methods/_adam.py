"""A requirement that Adam has on the data type of the parameters that it adapts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..models.view import ViT, require_supported


def require_room_for_squares(vit: ViT, adapted: Iterable[nn.Parameter]) -> None:
    """Raise an error if an adapted parameter is in float16.

    Adam divides by averages of squared gradients, and most of these squares are zero in float16.
    """
    require_supported(
        vit.model,
        all(p.dtype is not torch.float16 for p in adapted),
        "Adam divides by averages of squared gradients, which are too small for weights in float16. Convert it with "
        'model.bfloat16() or model.float(); precision="float16" then passes images in float16',
    )
