"""SAR: Towards Stable Test-Time Adaptation in Dynamic Wild World (Niu et al., ICLR 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.engine import Engine
from ..core.method import Info, Step
from ..core.registry import register
from ..errors import require_between
from ._leading import LeadingNorms
from ._losses import reliable_margin, require_loss, uncertainty


@register("sar")
class SAR(LeadingNorms):
    """Sharpness-aware minimisation of the entropy of reliable samples, over the norms of all but the last blocks.

    A sample is reliable if its entropy is below a margin, before the sharpness-aware ascent and after it. When the moving
    average of the loss gets so low that the model is about to predict one class for everything, it recovers: the source
    parameters come back.

    Args:
        lr: Learning rate of the norms; by default 0.001 for a batch of 64, proportional to the batch size, and twice that
            for a batch of 1.
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        rho: Radius of the sharpness-aware ascent.
        momentum: Momentum of SGD.
        recovery: Moving average of the loss below which the source parameters come back.
        decay: Decay of that moving average.
        blocks: Which blocks adapt: a number (the first so many) or indices; by default all but the last quarter, of which
            at most three are left out (9 of 12, 21 of 24).
        batch_size: Batch size for the default learning rate; by default that of each batch, with reference=True that of the
            first.
        loss: What is minimised, and compared with the margin: "entropy", or "come", the opinion entropy of COME (Zhang et
            al., ICLR 2025) whose mass of uncertainty is the number of classes.
        reference: Behave as the authors' released code, quirks included: momentum survives a recovery and moves the
            parameters when no sample is reliable, the moving average does not restart after a recovery, the margin counts
            all classes of the head, and matching by name leaves out blocks 9 to 11 of a 24-block model too.
            COME's mass of uncertainty is 1000.
    """

    info = Info(
        paper="Niu et al., ICLR 2023",
        adapts="norms of all but the last blocks",
        remembers="a moving average of the loss",
        passes=(2, 2),
    )

    def __init__(
        self,
        *,
        lr: float | None = None,
        margin: float | None = None,
        rho: float = 0.05,
        momentum: float = 0.9,
        recovery: float = 0.2,
        decay: float = 0.9,
        blocks: int | Sequence[int] | None = None,
        batch_size: int | None = None,
        loss: str = "entropy",
        reference: bool = False,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, blocks=blocks, batch_size=batch_size, reference=reference)
        require_between(0, math.inf, optional=True, margin=margin)
        require_between(0, math.inf, rho=rho, recovery=recovery)
        require_between(0, 1, decay=decay)
        require_loss(loss)
        self.margin = margin
        self.rho = rho
        self.recovery = recovery
        self.decay = decay
        self.loss = loss
        self.average: Tensor
        self.register_buffer("average", torch.tensor(math.nan))  # of the loss; NaN until there is one

    def step(self, images: Tensor, engine: Engine) -> Step:
        measure = uncertainty(self.loss, engine, reference=self.reference)
        margin = reliable_margin(engine, all_classes=self.reference) if self.margin is None else self.margin

        def reliable_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
            h = measure(logits)
            return h, h.detach() < margin

        first = engine.gradient(images, reliable_entropy, selective=True)
        used, loss = 0, None
        if first.used:
            with engine.adapted.perturbed(self.rho):
                second = engine.gradient(images, reliable_entropy, candidates=first.kept)
            if second.used:
                used, loss = second.used, second.loss
                average = float(self.average)
                self.average.fill_(loss if math.isnan(average) else self.decay * average + (1 - self.decay) * loss)

        if used:
            engine.adapted.update()
        elif self.reference:
            engine.adapted.zero_gradient()  # the released code steps on zeros: momentum still moves the parameters
            engine.adapted.update()

        average = float(self.average)
        event = None
        if average < self.recovery:
            event = "recovered"
            engine.adapted.restore(keep_momentum=self.reference)
            if not self.reference:
                self.average.fill_(math.nan)
        return Step(first.logits, used, loss, None if math.isnan(average) else average, event)
