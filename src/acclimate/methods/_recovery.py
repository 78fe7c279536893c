"""The recovery of SAR, DCT and ReCAP: a very low moving average of the loss restores the source parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..core.engine import Engine
from ..core.method import Step
from ..errors import require_between
from ._leading import LeadingNorms


class Recovering(LeadingNorms):
    """The base class of methods that watch a moving average of the loss.

    A very low value is a sign that the model is about to predict one class for all images.
    """

    keeps_momentum: ClassVar[bool] = True  # whether a recovery with `reference` keeps the momentum
    watched_share: ClassVar[float] = 1.0  # factor of the loss in the moving average

    def __init__(
        self,
        *,
        lr: float | None,
        momentum: float,
        recovery: float,
        decay: float,
        blocks: int | Sequence[int] | None,
        batch_size: int | None,
        reference: bool,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, blocks=blocks, batch_size=batch_size, reference=reference)
        require_between(0, math.inf, recovery=recovery)
        require_between(0, 1, decay=decay)
        self.recovery = recovery
        self.decay = decay
        self.average: Tensor
        self.register_buffer("average", torch.tensor(math.nan))  # moving average of the loss; NaN before the first one

    def learn(self, logits: Tensor, used: int, loss: float, engine: Engine) -> Step:
        """Update the parameters from `used` samples, and recover if the average loss is too low."""
        average = float(self.average)
        if used:
            new = self.watched_share * loss
            self.average.fill_(new if math.isnan(average) else self.decay * average + (1 - self.decay) * new)
        self.update(engine, used)
        average = float(self.average)
        event = None
        if average < self.recovery:
            event = "recovered"
            engine.adapted.restore(keep_momentum=self.reference and self.keeps_momentum)
            if not self.reference:
                self.average.fill_(math.nan)
        return Step(logits, used, loss if used else None, None if math.isnan(average) else average, event)
