"""RDumb: A simple approach that questions our progress in continual test-time adaptation (Press et al., NeurIPS 2023)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..core.engine import Engine
from ..core.method import Step
from ..core.registry import register
from ..errors import require_whole
from .eta import ETA


@register("rdumb")
class RDumb(ETA):
    """Run ETA, and reset parameters, momentum and average prediction to the source after a fixed number of steps.

    The method needs only the batch. Streams of one corruption of ImageNet-C are shorter than the default period unless their
    batches are small. On such a stream the method is equal to ETA.

        after each `period` steps:  w <- source,  and momentum and average prediction start anew
        every step:  a step of `eta`

    Args:
        lr: Learning rate; by default 0.00025 for a batch of 64, the authors' for ResNet-50, and proportional to the batch
            size. The same value for a ViT and the proportionality are ours.
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        redundancy: Cosine similarity with the average prediction from which on a sample is redundant.
        decay: Decay of the average prediction.
        period: Number of steps after which the source model is restored.
        momentum: Momentum of SGD.
        batch_size: Batch size for the default learning rate. By default it is that of each batch, and with reference=True
            that of the first batch.
        reference: Behave as the authors' released code, as in `ETA`.
    """

    info = replace(ETA.info, paper="Press et al., NeurIPS 2023")
    lr_at_64 = 0.00025

    def __init__(
        self,
        *,
        lr: float | None = None,
        margin: float | None = None,
        redundancy: float = 0.05,
        decay: float = 0.9,
        period: int = 1000,
        momentum: float = 0.9,
        batch_size: int | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__(
            lr=lr,
            margin=margin,
            redundancy=redundancy,
            decay=decay,
            momentum=momentum,
            batch_size=batch_size,
            reference=reference,
        )
        require_whole(1, period=period)
        self.period = int(period)
        self.since: Tensor
        self.register_buffer("since", torch.tensor(0))  # number of steps since the source model was restored
        self.ranges = {"since": (0, self.period)}

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Restore the source model if the period is over, and take a step of ETA."""
        due = int(self.since) == self.period
        average = None if due else self.average_prediction(engine)
        with engine.adapted.at_source() if due else nullcontext():
            result = self.look(images, engine, average)  # nothing has changed yet if this raises NonFiniteError
        if due:
            engine.adapted.restore()
            self.average.fill_(torch.nan)
            self.since.zero_()
        step = self.learn(result, engine, average)
        self.since += 1
        step.event = "recovered" if due else None
        return step
