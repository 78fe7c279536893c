"""Averages of predictions: that which several methods remember, and that of a batch, which is to be diverse.

The first has one number for each class of the head. A target domain may have fewer: then the first places are its classes',
and the others stay NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.engine import Engine
from ..models.view import ViT


def nothing_yet(vit: ViT) -> Tensor:
    """The average before there is any prediction."""
    return torch.full((vit.classes,), math.nan, dtype=vit.precise, device=vit.device)


def or_uniform(average: Tensor, classes: int) -> Tensor:
    """The average over the target's classes, at first all alike."""
    return average[:classes].nan_to_num(1 / classes)


def log_mean_prediction(images: Tensor, engine: Engine) -> Tensor:
    """Logarithm of the mean prediction of a batch."""
    return engine.ranks.gather(engine.predict(images)).softmax(-1).mean(0).clamp_min(1e-30).log()


def uniformity(logits: Tensor, log_mean: Tensor) -> Tensor:
    """Of each sample a share of sum q log q, q being the mean prediction of its batch, which is the lower the more diverse.

    With a constant log q, sum p log q has the mean and the gradient of sum q log q.
    """
    return (logits.softmax(-1) * log_mean).sum(-1)
