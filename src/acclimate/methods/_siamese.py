"""The common part of ZeroSiam and SPA: a predictor between features and head, as in siamese learning without negatives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.engine import Engine
from ..core.method import Method, Setup
from ..errors import require_between
from ..models.view import ModelView, parameters_of


class Siamese(Method):
    """The base class of methods that adapt all norms and a linear predictor before the head.

    There are two branches, one with and one without the predictor, which starts as the identity. Norms and predictor are
    adapted by SGD, each with its own learning rate. Predictions come from the branch without the predictor.
    """

    def __init__(self, *, lr: float | None, lr_predictor: float | None, momentum: float, reference: bool) -> None:
        super().__init__()
        require_between(0, math.inf, optional=True, lr=lr, lr_predictor=lr_predictor)
        require_between(0, 1, momentum=momentum)
        self.lr = lr
        self.lr_predictor = lr_predictor
        self.momentum = momentum
        self.reference = reference

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt all norms and the predictor."""
        view.require_logits_of_head()
        self._norms = parameters_of(view.norms)
        self.predictor = nn.Parameter(torch.eye(view.feature_width, dtype=view.dtype, device=view.device))
        return [*self._norms, self.predictor]

    def groups(self, lr: float, lr_predictor: float) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer; the arguments are the default learning rates."""
        return [
            {"params": self._norms, "lr": lr if self.lr is None else self.lr},
            {"params": [self.predictor], "lr": lr_predictor if self.lr_predictor is None else self.lr_predictor},
        ]

    def predicted(self, features: Tensor, engine: Engine) -> Tensor:
        """Return the logits of the branch with the predictor."""
        return engine.classify(features @ self.predictor.to(features.dtype).T)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(softmax(p) || softmax(q)) of each sample, where p and q are logits."""
    log_p = p.log_softmax(-1)
    return (log_p.exp() * (log_p - q.log_softmax(-1))).sum(-1)
