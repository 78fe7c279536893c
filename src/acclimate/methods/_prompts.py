"""Prompt tokens with the initial values of Visual Prompt Tuning (Jia et al., ECCV 2022)."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..models.view import ViT


def new_prompts(vit: ViT, count: int, rng: torch.Generator) -> nn.Parameter:
    """Return new prompt tokens, (count, width), drawn from U(-v, v) with v = sqrt(6 / (3 patch^2 + width))."""
    bound = math.sqrt(6 / (3 * patch_size(vit) ** 2 + vit.width))
    values = torch.empty(count, vit.width).uniform_(-bound, bound, generator=rng)
    return nn.Parameter(values.to(vit.device, vit.dtype))


def patch_size(vit: ViT) -> int:
    """Return the side of a patch in pixels, which is computed from the number of tokens.

    It is 16 for a model that takes images of any size.
    """
    if vit.image_size is None:
        return 16
    height, width = vit.image_size
    return round(math.sqrt(height * width / (vit.tokens - 1)))  # a few register tokens do not change the result
