"""Averages of predictions: the moving average of several methods, and the mean prediction of a batch.

The moving average has one entry for each class of the head. If the target domain has fewer classes, the first entries are
those of its classes, and the others stay NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.engine import Engine
from ..models.view import ModelView


def nothing_yet(view: ModelView) -> Tensor:
    """Return the initial value of the moving average, which is NaN."""
    return torch.full((view.classes,), math.nan, dtype=view.precise, device=view.device)


def or_uniform(average: Tensor, classes: int) -> Tensor:
    """Return the moving average over the classes of the target; it is uniform before the first prediction."""
    return average[:classes].nan_to_num(1 / classes)


def log_mean_prediction(images: Tensor, engine: Engine) -> Tensor:
    """Return the logarithm of the mean prediction of a batch."""
    return engine.ranks.gather(engine.predict(images)).softmax(-1).mean(0).clamp_min(1e-30).log()


def uniformity(logits: Tensor, log_mean: Tensor) -> Tensor:
    """Return the share of each sample in sum q log q, where q is the mean prediction of the batch.

    The sum is lower when the predictions of the batch are more diverse. With a constant log q, sum p log q has the mean and
    the gradient of sum q log q.
    """
    return (logits.softmax(-1) * log_mean).sum(-1)
