"""DELTA: Degradation-Free Fully Test-Time Adaptation (Zhao et al., ICLR 2023), the part that applies to a ViT."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from ..core.engine import Engine, entropy, keep_all
from ..core.method import Setup, Step
from ..core.registry import register
from ..errors import require_between
from ..models.view import ModelView
from ._predictions import nothing_yet, or_uniform
from .tent import Tent


@register("delta")
class DELTA(Tent):
    """Minimise the entropy over all norms, with less weight for classes that were predicted often.

    This is DOT (dynamic reweighting), one of the two parts of the paper. The other part, renormalisation by moving
    statistics of the batches (TBR), is for BatchNorm, which a ViT does not have. The weight of a sample is the inverse of
    the share of its predicted class in the predictions so far, and the weights of a batch sum up to its size. Therefore
    reweighting has no effect on a batch of 1. The method needs only the batch.

        q: average prediction;  r = 1 / q_y,  where y is the predicted class of a sample
        loss = sum of r H(z) over the batch / sum of r
        q <- decay q + (1 - decay) mean of softmax(z) over the batch

    Args:
        lr: Learning rate; by default 0.00025 for a batch of 64, the authors' for ResNet-50, and proportional to the batch
            size. The same value for a ViT and the proportionality are ours.
        decay: Decay of the moving average of the class shares.
        entropy_weight: Whether to learn only from samples with an entropy below 0.5 ln C, with a larger weight for lower
            entropies.
        momentum: Momentum of SGD.
        batch_size: Batch size for the default learning rate. By default it is that of each batch, and with reference=True
            that of the first batch.
        reference: Accepted by every method. Apart from TBR there is no quirk to reproduce here.
    """

    info = replace(Tent.info, paper="Zhao et al., ICLR 2023", remembers="an average prediction")
    lr_at_64 = 0.00025

    def __init__(
        self,
        *,
        lr: float | None = None,
        decay: float = 0.95,
        entropy_weight: bool = False,
        momentum: float = 0.9,
        batch_size: int | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, batch_size=batch_size, reference=reference)
        require_between(0, 1, decay=decay)
        self.decay = decay
        self.entropy_weight = bool(entropy_weight)
        self.shares: Tensor  # shares of the classes in the predictions so far; NaN before the first prediction

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt all norms, and create the moving average of the class shares."""
        self.register_buffer("shares", nothing_yet(view))
        return super().attach(view, setup)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Minimise the reweighted entropy of the batch, and update the class shares."""
        shares = or_uniform(self.shares, engine.num_classes)
        rarity = 1 / (engine.num_classes * shares).clamp(min=1e-12)
        threshold = 0.5 * math.log(engine.num_classes)

        def weighted_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
            h = entropy(logits)
            weight = rarity[logits.detach().argmax(-1)]
            if not self.entropy_weight:
                return keep_all(weight * h)
            certainty = (threshold - h.detach()).exp()
            return weight * certainty * h, certainty > 1

        result = engine.gradient(images, weighted_entropy, selective=self.entropy_weight)
        # The weights of a batch have to sum up to its size. This is a common factor of the gradient.
        logits = engine.ranks.gather(result.logits)
        weights = rarity[logits.argmax(-1)]
        factor = len(weights) / float(weights.sum())
        used, loss = result.used, None
        if used:
            engine.adapted.amend_gradient(times=factor)
            loss = factor * result.loss
            engine.adapted.update()
        new = self.decay * shares + (1 - self.decay) * logits.softmax(-1).mean(0)
        self.shares[: engine.num_classes] = new
        return Step(result.logits, used, loss)
