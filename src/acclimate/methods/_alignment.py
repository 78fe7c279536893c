"""The alignment of a batch's features with those of the source, for losses that couple the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.engine import Engine, keep_all, require_finite
from ..core.method import Step
from ..errors import InputError

WITHOUT_SPREAD = "skipped: a single image has no spread to compare"


def align(
    images: Tensor,
    engine: Engine,
    forward: Callable[[Tensor], tuple[Tensor, Tensor]],
    distance: Callable[[Tensor, Tensor], Tensor],
) -> Step:
    """Compute the gradient of a loss that depends on the features of the whole batch, and return the step.

    It takes two passes. The first one gives the features of the batch, and from them the gradient of the loss with respect
    to the features of each sample. With this gradient as a constant, <gradient, features> is a loss of each sample alone,
    and by the chain rule the sum of these losses has the same gradient with respect to the parameters. The result is exact
    for any division of the batch into micro-batches or over ranks.

    Args:
        images: The batch.
        engine: The engine.
        forward: A pass from images to logits and features.
        distance: A function from the features and logits of the whole batch to the loss.
    """
    logits, features = engine.evaluate(images, forward)
    everybody = engine.ranks.gather(features), engine.ranks.gather(logits)
    require_finite(*everybody)
    with torch.enable_grad():
        leaf = everybody[0].detach().requires_grad_()
        loss = distance(leaf, everybody[1])
        (slopes,) = torch.autograd.grad(loss, leaf)
    positions, count = engine.ranks.positions(images)
    # the engine takes the mean over the samples, but the chain rule needs the sum
    mine = count * slopes[positions.to(slopes.device)]
    engine.gradient(images, along, extras=(mine,), forward=lambda images, _: forward(images))
    return Step(logits, count, float(loss.detach()))


def along(logits: Tensor, features: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product of the features of each sample with a constant, and that every sample is kept."""
    losses = (features * slopes).sum(-1)
    return keep_all(losses)


def require_spread(method: str, batch_size: int) -> None:
    """Refuse a stream of single images, for a method that compares the spread of a batch with that of the source."""
    if batch_size == 1:
        raise InputError(
            f"{method} compares the spread of a batch with the source's, and a single image has none: collect a few images "
            "(the authors' 64, say) into a batch, or choose a method that learns from one (dct, sar, tent)."
        )
