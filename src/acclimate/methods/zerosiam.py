"""ZeroSiam: An Efficient Siamese for Test-Time Entropy Optimization without Collapse (Chen et al., arXiv 2025)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.engine import Engine, entropy, keep_all
from ..core.method import Info, Step, scaled_lr
from ..core.registry import register
from ..errors import require_between, require_whole
from ._siamese import Siamese, divergence


@register("zerosiam")
class ZeroSiam(Siamese):
    """Minimise the entropy of a branch with a predictor, and align it with the plain branch, which has no gradient.

    The entropy alone is lowest when all samples are predicted as one class. Here one of two branches has a linear predictor
    between the features and the head. A collapse would make the branches different, and the alignment, a divergence in both
    directions, prevents this. Predictions come from the plain branch.

        z = head(f),  z' = head(P f),  p = softmax(z) constant in the gradient,  p' = softmax(z')
        loss = mean of H(z') + alignment (KL(p || p') + KL(p' || p))

    The method needs only the batch. Both branches come from one pass.

    Args:
        lr: Learning rate of the norms; by default 0.005 for a batch of 64, proportional to the batch size, and twice that
            for a batch of 1.
        lr_predictor: Learning rate of the predictor; its default is the same as that of `lr`.
        alignment: Weight of the divergence between the branches.
        momentum: Momentum of SGD.
        batch_size: Batch size for the default learning rates. By default it is that of each batch, and with reference=True
            that of the first batch.
        reference: Accepted by every method. A step of the released code has no quirk to reproduce.
    """

    info = Info(
        paper="Chen et al., arXiv 2025",
        adapts="all norms, and a predictor before the head",
        requires=("norms", "features"),
        batch_statistics=True,
        passes=(1, 1),
        replies_first=True,
    )

    def __init__(
        self,
        *,
        lr: float | None = None,
        lr_predictor: float | None = None,
        alignment: float = 1.0,
        momentum: float = 0.9,
        batch_size: int | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__(lr=lr, lr_predictor=lr_predictor, momentum=momentum, reference=reference)
        require_between(0, math.inf, alignment=alignment)
        require_whole(1, optional=True, batch_size=batch_size)
        self.alignment = alignment
        self.batch_size = batch_size

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over norms and predictor."""
        batch_size = self.batch_size or batch_size
        rate = scaled_lr(batch_size, 0.005) * (2 if batch_size == 1 else 1)
        return torch.optim.SGD(self.groups(rate, rate), momentum=self.momentum)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Minimise the entropy and the divergence of the branches in one update."""

        def objective(logits: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
            plain, predicted = logits.detach(), self.predicted(features, engine)
            apart = divergence(plain, predicted) + divergence(predicted, plain)
            loss = entropy(predicted) + self.alignment * apart
            return keep_all(loss)

        result = engine.gradient(images, objective, forward=engine.forward_features)
        engine.adapted.update()
        return Step(result.logits, result.used, result.loss)
