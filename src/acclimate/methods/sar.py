"""SAR: Towards Stable Test-Time Adaptation in Dynamic Wild World (Niu et al., ICLR 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..core.engine import Engine
from ..core.method import Info, Step
from ..core.registry import register
from ..errors import require_between
from ._losses import reliable_margin, require_loss, uncertainty
from ._recovery import Recovering


@register("sar")
class SAR(Recovering):
    """Minimise the entropy of reliable samples, sharpness-aware, over the norms of all but the last blocks.

    A sample is reliable if its entropy is below a margin, both before and after the sharpness-aware ascent. A very low
    moving average of the loss is a sign that the model is about to predict one class for all images. In that case the source
    parameters are restored.

        S1 = the samples with H(z) < margin,  where H(z) is the entropy of softmax(z)
        e  = rho g / |g|,  where g is the gradient of the mean of H(z) over S1, at the parameters w
        S2 = the samples of S1 with H(z') < margin,  where z' are the logits with w + e
        loss = mean of H(z') over S2;  SGD applies its gradient at w + e to w
        a <- decay a + (1 - decay) loss;  w <- source if a < recovery

    Args:
        lr: Learning rate of the norms; by default 0.001 for a batch of 64, proportional to the batch size, and twice that
            for a batch of 1. If the norms are BatchNorm or GroupNorm it is the authors' for ResNet-50: 0.00025, and for
            batches below 32 proportional to their size.
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        rho: Radius of the sharpness-aware ascent.
        momentum: Momentum of SGD.
        recovery: Value of the moving average of the loss below which the source parameters are restored.
        decay: Decay of that moving average.
        blocks: Blocks that adapt: a number (the first blocks) or indices. By default all but the last quarter, of which at
            most three are left out (9 of 12, 21 of 24). A model without blocks has stages in their place: of the four of a
            ResNet or ConvNeXt the last one is left out.
        batch_size: Batch size for the default learning rate. By default it is that of each batch, and with reference=True
            that of the first batch.
        loss: The loss, which is also compared with the margin: "entropy", or "come", the opinion entropy of COME (Zhang et
            al., ICLR 2025), whose mass of uncertainty is the number of classes.
        reference: Behave as the authors' released code, quirks included: momentum is kept in a recovery and moves the
            parameters when no sample is reliable, the moving average does not restart after a recovery, the margin counts
            all classes of the head, and the selection by name leaves out blocks 9 to 11 of a 24-block model instead of
            the last three. The mass of uncertainty of COME is 1000.
    """

    info = Info(
        paper="Niu et al., ICLR 2023",
        adapts="norms of all but the last blocks",
        requires=("norms",),
        batch_statistics=True,
        remembers="a moving average of the loss",
        passes=(2, 2),
        replies_first=True,
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
        super().__init__(
            lr=lr,
            momentum=momentum,
            recovery=recovery,
            decay=decay,
            blocks=blocks,
            batch_size=batch_size,
            reference=reference,
        )
        require_between(0, math.inf, optional=True, margin=margin)
        require_between(0, math.inf, rho=rho)
        require_loss(loss)
        self.margin = margin
        self.rho = rho
        self.loss = loss

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Learn from the reliable samples by one sharpness-aware step, and recover if the loss is too low."""
        measure = uncertainty(self.loss, engine, reference=self.reference)
        margin = reliable_margin(engine, all_classes=self.reference) if self.margin is None else self.margin

        def reliable_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
            h = measure(logits)
            return h, h.detach() < margin

        first = engine.gradient(images, reliable_entropy, selective=True)
        used, loss = 0, math.nan
        if first.used:
            with engine.adapted.perturbed(self.rho):
                second = engine.gradient(images, reliable_entropy, candidates=first.kept)
            used, loss = second.used, second.loss
        return self.learn(first.logits, used, loss, engine)
