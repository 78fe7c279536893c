"""CMF: Continual Momentum Filtering on Parameter Space for Online Test-time Adaptation (Lee and Chang, ICLR 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.engine import Engine
from ..core.method import Setup
from ..core.registry import register
from ..errors import require_between
from ..models.view import ViT
from ._teacher import Teacher, blend
from .roid import ROID

LEAST, SURE = 0.89, 0.9999  # of the gain
PARAMETERS = 38_400  # of the norms of ViT-B, for which `q` is given


@register("cmf")
class CMF(ROID):
    """ROID's loss and correction, with a filter in the space of parameters instead of a pull towards the source.

    A hidden model, which leans on the source, is a Kalman-like estimate of what the adapted parameters, its noisy
    observations, move about; after each step they are drawn towards it.

    Needs what `ROID` needs, and memory for the hidden model's norms.

    Args:
        lr: Learning rate.
        momentum: Momentum of SGD.
        nesterov: Nesterov's momentum.
        decay: Share of the average prediction that stays at each step.
        temperature: Of the weights: the lower, the more a diverse and certain sample counts.
        alpha: Share of the hidden model that stays when it leans on the source.
        gamma: Share of the adapted parameters that stays when they are drawn towards the hidden model.
        q: Variance that the hidden model gains at each step, for the norms of ViT-B; it is proportional to the number of
            adapted parameters.
        window: Of a stream of single images: see `ROID`.
        reference: Behave as the released code: see `ROID`.
    """

    info = replace(
        ROID.info,
        paper="Lee and Chang, ICLR 2024",
        adapts="all norms, and a filtered copy of them",
        remembers="a second copy of the norms, and an average prediction",
    )

    def __init__(
        self,
        *,
        lr: float = 0.00025,
        momentum: float = 0.9,
        nesterov: bool = True,
        decay: float = 0.9,
        temperature: float = 1 / 3,
        alpha: float = 0.99,
        gamma: float = 0.99,
        q: float = 0.005,
        window: int | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__(
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            decay=decay,
            temperature=temperature,
            window=window,
            reference=reference,
        )
        require_between(0, 1, alpha=alpha, gamma=gamma)
        require_between(0, math.inf, q=q)
        self.alpha = alpha
        self.gamma = gamma
        self.q = q
        self.variance: Tensor
        self.register_buffer("variance", torch.tensor(0.0, dtype=torch.float64))

    def attach(self, vit: ViT, setup: Setup) -> Iterable[nn.Parameter]:
        adapted = list(super().attach(vit, setup))
        self.hidden = Teacher(adapted)
        return adapted

    def ensemble(self, engine: Engine) -> None:
        q = min(1.0, self.q * sum(p.numel() for p in engine.adapted.tensors) / PARAMETERS)
        hidden = self.hidden.weights
        blend(hidden, engine.adapted.source, self.alpha)
        variance = self.alpha**2 * float(self.variance) + q
        gain = self.gain(variance, q)
        self.variance.fill_(gain * variance)
        blend(hidden, engine.adapted.tensors, gain)
        blend(engine.adapted.tensors, hidden, self.gamma)

    @staticmethod
    def gain(variance: float, q: float) -> float:
        """Share of the hidden model that stays when it takes in the adapted parameters."""
        share = (1 - q) / (variance + 1 - q) if variance else 1.0
        return 1.0 if share > SURE else max(share, LEAST)
