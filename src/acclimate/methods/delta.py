"""DELTA: Degradation-Free Fully Test-Time Adaptation (Zhao et al., ICLR 2023), the part that a ViT has a use for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from ..core.engine import Engine, entropy, keep_all
from ..core.method import Setup, Step
from ..core.registry import register
from ..errors import require_between
from ..models.view import ViT
from ._predictions import nothing_yet, or_uniform
from .tent import Tent


@register("delta")
class DELTA(Tent):
    """Minimise the entropy over all norms, with less weight for classes that were predicted often (dynamic reweighting).

    Of the paper's two parts this is one, DOT. The other, renormalisation by moving statistics of the batches (TBR), is for
    BatchNorm, which a ViT has not. A sample's weight is the inverse of its predicted class's share in the predictions so
    far, and the weights of a batch sum up to its size: for a batch of 1 there is nothing to reweight. It needs nothing
    beyond the batch.

    Args:
        lr: Learning rate; by default 0.00025 for a batch of 64, the authors' for ResNet-50, and proportional to the batch
            size. That it is the same for a ViT, and the proportion, are ours.
        decay: Decay of the classes' shares.
        entropy_weight: Learn from samples with an entropy below 0.5 ln C alone, the surer ones with a larger weight.
        momentum: Momentum of SGD.
        batch_size: Batch size for the default learning rate; by default that of each batch, with reference=True that of the
            first.
        reference: Accepted by every method; apart from TBR there is no quirk to reproduce here.
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
        self.shares: Tensor  # of the classes in the predictions so far; NaN until there are any

    def attach(self, vit: ViT, setup: Setup) -> Iterable[nn.Parameter]:
        self.register_buffer("shares", nothing_yet(vit))
        return super().attach(vit, setup)

    def step(self, images: Tensor, engine: Engine) -> Step:
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
        # Whatever the weights of a batch sum up to, they are to sum up to its size: a factor for the gradient as a whole.
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
