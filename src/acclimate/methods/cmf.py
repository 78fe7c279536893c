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
from ..models.view import ModelView
from ._teacher import Teacher, blend
from .roid import ROID

LEAST, SURE = 0.89, 0.9999  # bounds of the gain: the least value, and the value above which it is 1
PARAMETERS = 38_400  # number of parameters in the norms of ViT-B, to which `q` refers


@register("cmf")
class CMF(ROID):
    """Minimise the loss of ROID, and filter the parameters instead of moving them towards the source.

    The filter is similar to a Kalman filter. Its state is a hidden model, which is moved towards the source at each step.
    The adapted parameters are noisy observations of it, and after each step they are moved towards the hidden model.

        w: parameters after a step on the loss of `roid`;  h: hidden model;  w0: source;  v: variance
        h <- alpha h + (1 - alpha) w0,  v <- alpha^2 v + q
        k = (1 - q) / (v + 1 - q)
        h <- k h + (1 - k) w,  v <- k v
        w <- gamma w + (1 - gamma) h

    The method needs what `ROID` needs, and memory for the norms of the hidden model.

    Args:
        lr: Learning rate.
        momentum: Momentum of SGD.
        nesterov: Whether to use Nesterov's momentum.
        decay: Share of the average prediction that is kept at each step.
        temperature: Temperature of the sample weights. With a lower value, diverse and certain samples have more weight.
        alpha: Share of the hidden model that is kept when it moves towards the source.
        gamma: Share of the adapted parameters that is kept when they move towards the hidden model.
        q: Variance that the hidden model gains at each step, for the norms of ViT-B. It is proportional to the number of
            adapted parameters.
        window: Window for streams of single images, as in `ROID`.
        reference: Behave as the released code, as in `ROID`.
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
        self.ranges = {"variance": (0, math.inf)}

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt all norms, and create the hidden model."""
        adapted = list(super().attach(view, setup))
        self.hidden = Teacher(adapted)
        return adapted

    def ensemble(self, engine: Engine) -> None:
        """Update the hidden model, and move the adapted parameters towards it."""
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
        """Return the share of the hidden model that is kept when the adapted parameters update it."""
        share = (1 - q) / (variance + 1 - q) if variance else 1.0
        return 1.0 if share > SURE else max(share, LEAST)
