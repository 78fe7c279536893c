"""Tent: Fully Test-Time Adaptation by Entropy Minimization (Wang et al., ICLR 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..core.engine import Engine, keep_all
from ..core.method import Info, Method, Setup, Step, lr_of_norms, scaled_lr
from ..core.registry import register
from ..errors import require_between, require_whole
from ..models.view import ModelView, parameters_of
from ._losses import require_loss, uncertainty


@register("tent")
class Tent(Method):
    """Minimise the mean prediction entropy of every batch over the affine parameters of all normalisation layers.

    BatchNorm layers use the statistics of the batch. Later papers use the name TENT for other norms, too, such as those of a
    ViT.

        p = softmax(z),  H(z) = -sum_c p_c ln p_c
        loss = mean of H(z) over the batch
        with loss="come":  o = softmax(z, ln C),  H(z) = -sum_c o_c ln o_c,  with a constant |z| in the gradient

    Args:
        lr: Learning rate; by default 0.001 for a batch of 64, or 0.00025 if the norms are BatchNorm or GroupNorm (the
            authors' for ResNet-50), proportional to the batch size.
        momentum: Momentum of SGD.
        batch_size: Batch size for the default learning rate. By default it is that of each batch, and with reference=True
            that of the first batch.
        loss: The loss: "entropy", or "come", the opinion entropy of COME (Zhang et al., ICLR 2025), whose mass of
            uncertainty is the number of classes.
        reference: Behave as the authors' released code. That of TENT has no quirk to reproduce. That of COME always has a
            mass of 1000.
    """

    info = Info(
        paper="Wang et al., ICLR 2021",
        adapts="all norms",
        requires=("norms",),
        batch_statistics=True,
        passes=(1, 1),
        replies_first=True,
    )
    lr_at_64: ClassVar[float] = 0.001

    def __init__(
        self,
        *,
        lr: float | None = None,
        momentum: float = 0.9,
        batch_size: int | None = None,
        loss: str = "entropy",
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_between(0, math.inf, optional=True, lr=lr)
        require_whole(1, optional=True, batch_size=batch_size)
        require_between(0, 1, momentum=momentum)
        require_loss(loss)
        self.lr = lr
        self.momentum = momentum
        self.batch_size = batch_size
        self.loss = loss
        self.reference = reference

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt all norms."""
        self._lr_at_64 = lr_of_norms(view, self.lr_at_64)
        self._adapted = parameters_of(view.norms)
        return self._adapted

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over the norms."""
        lr = scaled_lr(self.batch_size or batch_size, self._lr_at_64) if self.lr is None else self.lr
        return torch.optim.SGD(self._adapted, lr=lr, momentum=self.momentum)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Minimise the entropy of all samples of the batch in one update."""
        measure = uncertainty(self.loss, engine, reference=self.reference)

        def objective(logits: Tensor) -> tuple[Tensor, Tensor]:
            h = measure(logits)
            return keep_all(h)

        result = engine.gradient(images, objective)
        engine.adapted.update()
        return Step(result.logits, used=result.used, loss=result.loss)
