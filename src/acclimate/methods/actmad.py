"""ActMAD: Activation Matching to Align Distributions for Test-Time Training (Mirza et al., CVPR 2023), for a ViT."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.engine import Engine
from ..core.method import Setup, Step
from ..core.registry import register
from ..core.statistics import constants
from ..errors import require_between
from ..models.view import ModelView
from ._alignment import WITHOUT_SPREAD, align, require_spread
from .tent import Tent


@register("actmad")
class ActMAD(Tent):
    """Align the mean and the standard deviation of the class token after every block with those of the source.

    The loss is a weight times the absolute difference of the means plus that of the standard deviations, each averaged over
    all features of the class tokens. The method needs batches of at least two images, because one image has no standard
    deviation. A stream of single images is refused. A single image at the end of another stream is predicted, and nothing is
    learned from it.

        t_b: class token after block b;  mean and std are over the batch, and with index 0 those of the source
        loss = weight (mean of |mean(t_b) - mean0_b| + mean of |std(t_b) - std0_b|),  each over all b and features

    The means and standard deviations of the source are those of clean images (12 batches in the comparison of SPA).
    `acclimate.source_statistics` computes them once: `acclimate.adapt(model, "actmad",
    source_statistics="stats.safetensors")`. They are kept in the state file. The method also needs a second forward pass.

    Args:
        lr: Learning rate. It does not depend on the batch size.
        weight: Weight of the loss.
        momentum: Momentum of SGD.
        reference: Accepted by every method. It changes nothing: quirks of released code are not known to us.

    Ours: the original aligns the activations of a convolutional network. Class tokens, learning rate and weight are those of
    the form for a ViT that the authors of SPA compare with. The distance, the momentum, and the choice of all norms as what
    adapts are ours.
    """

    info = replace(
        Tent.info,
        paper="Mirza et al., CVPR 2023",
        remembers="mean and spread of the source's class tokens",
        requires=("norms", "blocks"),
        needs=("class_tokens",),
        passes=(2, 1),
        exceptions={"batch_of_one": "one image has no standard deviation"},
    )

    def __init__(self, *, lr: float = 0.005, weight: float = 30.0, momentum: float = 0.9, reference: bool = False) -> None:
        super().__init__(lr=lr, momentum=momentum, reference=reference)
        require_between(0, math.inf, lr=lr, weight=weight)
        self.weight = weight

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Load the source statistics, and adapt all norms."""
        found = setup.statistics_of("class_tokens")
        self.source = constants((found["mean"], found["std"]), view)
        return super().attach(view, setup)

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over the norms, and raise an error if the batch size of the stream is 1."""
        require_spread(self.name, batch_size)
        return super().optimizer(batch_size)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Align the class tokens of the batch with the source in one update, by two passes."""
        if engine.ranks.positions(images)[1] == 1:
            return Step(self.predict(images, engine), event=WITHOUT_SPREAD)
        aligned = align(images, engine, lambda part: engine.forward_with(engine.view.class_tokens, part), self.distance)
        engine.adapted.update()
        return aligned

    def distance(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of a batch."""
        mean = tokens.mean(0)
        variance = (tokens - mean).square().sum(0) / (len(tokens) - 1)
        std = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()  # the root has no gradient at 0
        return self.weight * sum((ours - source).abs().mean() for ours, source in zip((mean, std), self.source))
