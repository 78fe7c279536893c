"""Prompt tokens with the initial values of Visual Prompt Tuning (Jia et al., ECCV 2022)."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..models.view import ModelView


def new_prompts(view: ModelView, count: int, rng: torch.Generator) -> nn.Parameter:
    """Return new prompt tokens, (count, width), drawn from U(-v, v) with v = sqrt(6 / (3 patch^2 + width))."""
    bound = math.sqrt(6 / (3 * patch_size(view) ** 2 + view.width))
    values = torch.empty(count, view.width).uniform_(-bound, bound, generator=rng)
    return nn.Parameter(values.to(view.device, view.dtype))


def patch_size(view: ModelView) -> int:
    """Return the side of a patch in pixels, which is computed from the number of tokens.

    It is 16 for a model that takes images of any size.
    """
    if view.usual_size is None:
        return 16
    height, width = view.usual_size
    return round(math.sqrt(height * width / (view.tokens - 1)))  # a few register tokens do not change the result
