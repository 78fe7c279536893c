"""NORM: Improving robustness against common corruptions by covariate shift adaptation (Schneider et al., NeurIPS 2020)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from ..core.engine import Engine
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..errors import require_between
from ..models.view import ModelView


@register("norm")
class Norm(Method):
    """Normalise with statistics of the batch, mixed with those of the source data, in every BatchNorm.

    No parameter changes, and nothing is remembered. Mean and variance are weighted means of those of the source and those of
    the batch. Their weights are the number of images that the source counts as, and the number of images in the batch.
    Therefore a single image moves the statistics a little, and a large batch determines them.

        mean = (prior mean_source + B mean_batch) / (prior + B),  and the variance likewise

    Args:
        prior: Number of images that the statistics of the source count as. The authors choose it for each size of batches.
            16 is the value of MEMO's authors for single images. With 0 the statistics are those of the batch alone
            (prediction-time BatchNorm, Nado et al., 2020).
        reference: Accepted by every method. It has no effect here.
    """

    info = Info(
        paper="Schneider et al., NeurIPS 2020",
        adapts="statistics of BatchNorm",
        requires=("batch norms",),
    )

    def __init__(self, *, prior: float = 16.0, reference: bool = False) -> None:
        super().__init__()
        require_between(0, math.inf, prior=prior)
        self.prior = prior
        self.reference = reference

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Let every BatchNorm use the mixed statistics, and adapt no parameter."""
        view.mix_statistics(self.prior)
        return []

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Predict the batch with its own statistics."""
        return Step(engine.predict(images))
