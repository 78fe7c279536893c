"""Prompt tokens as Visual Prompt Tuning begins with them (Jia et al., ECCV 2022)."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..models.view import ViT


def new_prompts(vit: ViT, count: int, rng: torch.Generator) -> nn.Parameter:
    """So many tokens, (count, width), from U(-v, v) with v = sqrt(6 / (3 patch^2 + width))."""
    bound = math.sqrt(6 / (3 * patch_size(vit) ** 2 + vit.width))
    values = torch.empty(count, vit.width).uniform_(-bound, bound, generator=rng)
    return nn.Parameter(values.to(vit.device, vit.dtype))


def patch_size(vit: ViT) -> int:
    """Side of a patch in pixels, as the number of tokens tells; 16 for a model that takes images of any size."""
    if vit.image_size is None:
        return 16
    height, width = vit.image_size
    return round(math.sqrt(height * width / (vit.tokens - 1)))  # a few register tokens do not change the result
