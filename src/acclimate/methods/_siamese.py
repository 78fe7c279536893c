"""What ZeroSiam and SPA share: a predictor between the features and the head, as in siamese learning without negatives."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..errors import require_between
from ..method import Method
from ..vit import ViT, parameters_of


class Siamese(Method):
    """Methods that adapt all norms, and a predictor that starts as the identity: it makes one branch differ from the other.

    Both are adapted by SGD, each at its own learning rate. Predictions come from the branch without the predictor.
    """

    def __init__(
        self, *, lr: float | None, lr_predictor: float | None, momentum: float, batch_size: int | None, reference: bool
    ) -> None:
        super().__init__()
        require_between(0, math.inf, optional=True, lr=lr, lr_predictor=lr_predictor)
        require_between(0, 1, momentum=momentum)
        require_between(1, math.inf, optional=True, batch_size=batch_size)
        self.lr = lr
        self.lr_predictor = lr_predictor
        self.momentum = momentum
        self.batch_size = batch_size
        self.reference = reference

    def attach(self, vit: ViT, rng: torch.Generator) -> Iterable[nn.Parameter]:
        self._norms = parameters_of(vit.norms)
        self.predictor = nn.Parameter(torch.eye(vit.head.in_features, dtype=vit.dtype, device=vit.device))
        return [*self._norms, self.predictor]

    def rates(self, batch_size: int) -> tuple[float, float]:
        """Default learning rates of the norms and of the predictor."""
        raise NotImplementedError

    def groups(self, batch_size: int) -> list[dict[str, object]]:
        """The optimizer's two groups."""
        norms, predictor = self.rates(self.batch_size or batch_size)
        return [
            {"params": self._norms, "lr": norms if self.lr is None else self.lr},
            {"params": [self.predictor], "lr": predictor if self.lr_predictor is None else self.lr_predictor},
        ]


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(softmax(p) || softmax(q)) from logits, per sample."""
    log_p = p.log_softmax(-1)
    return (log_p.exp() * (log_p - q.log_softmax(-1))).sum(-1)
