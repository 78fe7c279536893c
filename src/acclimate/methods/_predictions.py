"""The average of predictions that several methods remember, one number for each class of the head.

A target domain may have fewer classes than the head. Then the first places are its classes', and the others stay NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..vit import ViT


def nothing_yet(vit: ViT) -> Tensor:
    """The average before there is any prediction."""
    return torch.full((vit.classes,), math.nan, device=vit.device)


def or_uniform(average: Tensor, classes: int) -> Tensor:
    """The average over the target's classes, at first all alike."""
    return average[:classes].nan_to_num(1 / classes)
