"""Keel: our own method, which keeps a model upright while it learns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.engine import Engine, GradientResult, entropy
from ..core.method import Setup, Step
from ..core.parameters import global_norm
from ..core.registry import register
from ..errors import require_between
from ..models.view import ModelView
from ._losses import reliable_margin
from .eta import ETA


@register("keel")
class Keel(ETA):
    """Recentre the features, and minimise the entropy of reliable and non-redundant samples by steps of a fixed length.

    Entropy minimisation learns from the predictions of the model, and under a strong shift these name few classes.
    Recentring (`adapt(recentre=)`) removes the displacement of the features first, without a gradient. Then the loss of ETA
    is minimised over all norms. The length of a step does not depend on the gradient, which is a thousand times longer for
    one model and shift than for another: a step is `rho` times the norm of the parameters, times the root of the share of
    samples that it learns from, and shorter if the mean entropy of the batch is below the margin: a model that is sure has
    little to learn. With each batch the parameters return a small part of their way to the source, and most of it if
    recentring sees that the domain has changed. The method costs one forward pass of each image, and a backward pass of the
    samples that it keeps. It needs only the batch.

        z = logits of centred features;  g = gradient of the loss of `eta`,  learned from n of B samples
        length = rho |w0| sqrt(n / B) min(1, mean of H(z) / margin),  where w0 are the source parameters
        w <- w + (1 - k (1 - anchor)^(B / 64)) (w0 - w),  where k is what recentring keeps of the stream, as a rule 1
        w <- step of SGD with the gradient g length / |g| and the learning rate B / 64

    Args:
        rho: Largest length of a step for a batch of 64, as a share of the norm of the parameters. It is proportional to the
            batch size.
        anchor: Share of the way back to the source parameters that each batch of 64 takes.
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        redundancy: Cosine similarity with the average prediction, times the root of the number of classes, from which on a
            sample is redundant.
        decay: Decay of the average prediction.
        momentum: Momentum of SGD.
        batch_size: Batch size for the length of a step. By default it is that of each batch.
        reference: Accepted by every method. It has no effect here.

    Ours: the loss and the choice of samples are those of ETA (Niu et al., ICML 2022), and the plain form of recentring is
    that of NEO (Murphy et al., ICLR 2026). Everything else is ours, and so are all constants.
    """

    info = replace(ETA.info, paper="ours", requires=("norms", "features"), recentre="order")

    def __init__(
        self,
        *,
        rho: float = 0.001,
        anchor: float = 0.05,
        margin: float | None = None,
        redundancy: float = 1.5,
        decay: float = 0.9,
        momentum: float = 0.9,
        batch_size: int | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__(margin=margin, redundancy=redundancy, decay=decay, momentum=momentum, batch_size=batch_size)
        require_between(0, math.inf, rho=rho)
        require_between(0, 1, anchor=anchor)
        self.rho = rho
        self.anchor = anchor
        self.reference = reference

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt all norms, and measure their length."""
        adapted = list(super().attach(view, setup))
        self._length = float(global_norm([p.detach().to(view.precise) for p in adapted]))
        return adapted

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over the norms, for gradients of the length of a step for a batch of 64."""
        return torch.optim.SGD(self._adapted, lr=(self.batch_size or batch_size) / 64, momentum=self.momentum)

    def redundant_from(self, engine: Engine) -> float:
        """Return the similarity from which on a sample is redundant."""
        return self.redundancy / math.sqrt(engine.num_classes)

    def learn(self, result: GradientResult, engine: Engine, average: Tensor | None) -> Step:
        """Move the parameters a part of their way to the source, and then make the step of ETA."""
        batch = self.batch_size or int(engine.batch_size)
        kept = 1.0 if engine.recentring is None else engine.recentring.kept
        engine.adapted.approach_source(1 - kept * (1 - self.anchor) ** (batch / 64))
        return super().learn(result, engine, average)

    def regularise(self, result: GradientResult, engine: Engine) -> float:
        """Give the gradient the length of a step."""
        batch = self.batch_size or int(engine.batch_size)
        norm = engine.adapted.gradient_norm()
        if norm > 0:
            margin = reliable_margin(engine) if self.margin is None else self.margin
            doubt = float(entropy(engine.ranks.gather(result.logits)).mean())
            share = math.sqrt(min(1.0, result.used / batch)) * min(1.0, doubt / margin)
            engine.adapted.amend_gradient(times=self.rho * self._length * share / norm)
        return 0.0
