"""DeYO: Entropy is not Enough for Test-Time Adaptation (Lee et al., ICLR 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.engine import Engine, entropy
from ..core.method import Info, Step
from ..core.registry import register
from ..errors import require_between, require_whole
from ._leading import LeadingNorms


@register("deyo")
class DeYO(LeadingNorms):
    """Minimise the entropy of samples whose prediction is certain and depends on the shape of the object.

    A shuffle of the patches of an image keeps its texture and destroys its shape. The decrease of the probability of the
    predicted class by this shuffle, the pseudo-label probability difference (PLPD), has to exceed a threshold. Samples with
    lower entropy and higher PLPD have more weight.

        PLPD = p_y(x) - p_y(x'),  where y is the predicted class of x, and x' is x with shuffled patches
        S = the samples with H(z) < margin and PLPD > threshold
        weight = entropy_weight exp(weight_margin - H(z)) + plpd_weight exp(PLPD),  constant in the gradient
        loss = mean of weight H(z) over S

    In addition to the batch, the method needs a second pass without gradients, of the certain samples with shuffled patches.

    Args:
        lr: Learning rate of the norms; by default 0.001 for a batch of 64, proportional to the batch size, and twice that
            for a batch of 1. If the norms are BatchNorm or GroupNorm it is the authors' for ResNet-50: 0.00025, and for
            batches below 32 proportional to their size.
        margin: Entropy, in nats, below which a sample is certain; by default 0.5 ln C for C classes.
        weight_margin: Entropy at which the weight for low entropy is 1; by default 0.4 ln C.
        threshold: PLPD above which the method learns from a sample; by default 0.3 if the norms are BatchNorm, and 0.2
            otherwise.
        grid: The image is divided into grid x grid patches. An image that cannot be divided evenly is resized for the
            shuffle; how it is resized is our choice.
        entropy_weight: Factor of the weight for low entropy, exp(weight_margin - entropy).
        plpd_weight: Factor of the weight for a high PLPD, exp(PLPD). If both factors are 0, all samples have the same
            weight.
        momentum: Momentum of SGD.
        blocks: Blocks that adapt: a number (the first blocks) or indices. By default all but the last quarter, of which at
            most three are left out (9 of 12, 21 of 24). A model without blocks has stages in their place: of the four of a
            ResNet or ConvNeXt the last one is left out.
        batch_size: Batch size for the default learning rate. By default it is that of each batch, and with reference=True
            that of the first batch.
        reference: Behave as the authors' released code: the selection by name leaves out blocks 9 to 11 of a 24-block
            model instead of the last three.
    """

    info = Info(
        paper="Lee et al., ICLR 2024",
        adapts="norms of all but the last blocks",
        requires=("norms",),
        batch_statistics=True,
        passes=(2, 1),
        replies_first=True,
    )

    def __init__(
        self,
        *,
        lr: float | None = None,
        margin: float | None = None,
        weight_margin: float | None = None,
        threshold: float | None = None,
        grid: int = 4,
        entropy_weight: float = 1.0,
        plpd_weight: float = 1.0,
        momentum: float = 0.9,
        blocks: int | Sequence[int] | None = None,
        batch_size: int | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, blocks=blocks, batch_size=batch_size, reference=reference)
        require_between(0, math.inf, optional=True, margin=margin, weight_margin=weight_margin)
        require_between(-1, 1, optional=True, threshold=threshold)
        require_between(0, math.inf, entropy_weight=entropy_weight, plpd_weight=plpd_weight)
        require_whole(2, grid=grid)
        self.margin = margin
        self.weight_margin = weight_margin
        self.threshold = threshold
        self.grid = grid
        self.entropy_weight = entropy_weight
        self.plpd_weight = plpd_weight

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Learn from the certain samples with a high PLPD in one update."""
        log_c = math.log(engine.num_classes)
        usual = 0.3 if engine.view.kind_of_norm == "batch" else 0.2
        threshold = usual if self.threshold is None else self.threshold
        margin = 0.5 * log_c if self.margin is None else self.margin
        weight_margin = 0.4 * log_c if self.weight_margin is None else self.weight_margin

        def objective(logits: Tensor, images: Tensor, orders: Tensor) -> tuple[Tensor, Tensor]:
            h = entropy(logits)
            h0 = h.detach()
            sure = h0 < margin
            plpd = plpd_of(images, logits.detach(), sure, orders, self.grid, engine)
            weight = self.entropy_weight * (weight_margin - h0).exp() + self.plpd_weight * plpd.exp()
            return h * weight if self.entropy_weight or self.plpd_weight else h, plpd > threshold

        result = engine.gradient(images, objective, extras=(images, self.orders(images, engine)), selective=True)
        if not result.used:
            return Step(result.logits)
        engine.adapted.update()
        return Step(result.logits, result.used, result.loss)

    def orders(self, images: Tensor, engine: Engine) -> Tensor:
        """Draw an order of the patches for each image, (batch, grid * grid)."""
        return draw_orders(images, self.grid, engine)


def draw_orders(images: Tensor, grid: int, engine: Engine) -> Tensor:
    """Draw an order of the patches for each image, (batch, grid * grid)."""
    positions, count = engine.ranks.positions(images)
    keys = torch.rand(count, grid**2, generator=engine.rng)
    return keys.argsort(-1).to(images.device)[positions.to(images.device)]


@torch.no_grad()
def plpd_of(images: Tensor, logits: Tensor, chosen: Tensor, orders: Tensor, grid: int, engine: Engine) -> Tensor:
    """Return the PLPD of the chosen samples. That of the others is -inf, and they are not passed."""
    plpd = torch.full_like(logits[:, 0], -math.inf)
    if chosen.any():
        shuffled = engine.forward(shuffle(images[chosen], orders[chosen], grid))
        plpd[chosen] = difference(logits[chosen], shuffled)
    return plpd


def difference(logits: Tensor, shuffled: Tensor) -> Tensor:
    """Return the pseudo-label probability difference: how much the predicted class loses by the shuffle."""
    predicted = logits.argmax(-1, keepdim=True)
    return (logits.softmax(-1).gather(-1, predicted) - shuffled.softmax(-1).gather(-1, predicted)).squeeze(-1)


def shuffle(images: Tensor, orders: Tensor, grid: int) -> Tensor:
    """Return images whose patch i, in reading order, is patch orders[:, i] of the original."""
    size = images.shape[-2:]
    even = tuple(max(1, side // grid) * grid for side in size)
    if even != size:
        images = F.interpolate(images, even, mode="bilinear", align_corners=False)
    patches = images.unflatten(-2, (grid, -1)).unflatten(-1, (grid, -1)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    patches = patches[torch.arange(len(images), device=images.device)[:, None], orders]
    images = patches.unflatten(1, (grid, grid)).permute(0, 3, 1, 4, 2, 5).flatten(-2).flatten(-3, -2)
    return F.interpolate(images, size, mode="bilinear", align_corners=False) if even != size else images
