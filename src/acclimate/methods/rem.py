"""REM: Ranked Entropy Minimization for Continual Test-Time Adaptation (Han et al., ICML 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor, nn

from ..core.engine import Engine, entropy, keep_all
from ..core.method import Info, Setup, Step
from ..core.registry import register
from ..errors import ConfigError, require_between, require_whole
from ..models.view import ModelView
from ._leading import LeadingNorms


@register("rem")
class REM(LeadingNorms):
    """Keep the predictions of ever harder views of an image consistent, and their entropies in the order of difficulty.

    The first view is the image. Each further view lacks more of the patches than the one before: those to which the class
    token attends most in the last block. The loss is the cross-entropy of each view with every easier view as its target,
    plus the amount by which the entropy of each view exceeds that of every harder view. Targets and the entropies of harder
    views are constants. The method needs only the batch.

        z_0, z_1, ...: logits of the views, from easy to hard;  p_i = softmax(z_i)
        loss = mean of sum over i < j of (cross-entropy(p_i, z_j) + ranking max(0, H(z_i) - H(z_j) + margin)),
               where p_i and H(z_j) are constants in the gradient

    Args:
        lr: Learning rate of Adam. That of the authors does not depend on the batch size.
        views: Number of views.
        removed: Share of the patches that each view lacks in addition to the view before.
        ranking: Weight of the order of the entropies.
        margin: Entropy, in nats, by which a harder view has to exceed an easier one.
        momentum: Decay of the first moment of Adam. That of the second moment is 0.999.
        blocks: Blocks that adapt: a number (the first blocks) or indices. By default all but the last quarter, of which at
            most three are left out (9 of 12, 21 of 24).
        reference: Behave as the authors' released code: the selection by name leaves out blocks 9 to 11 of a 24-block
            model instead of the last three.
    """

    info = Info(
        paper="Han et al., ICML 2025",
        adapts="norms of all but the last blocks",
        requires=("norms", "blocks"),
        passes=(3, 3),
        replies_first=True,
        float16=False,
    )

    def __init__(
        self,
        *,
        lr: float = 0.001,
        views: int = 3,
        removed: float = 0.1,
        ranking: float = 1.0,
        margin: float = 0.0,
        momentum: float = 0.9,
        blocks: int | Sequence[int] | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, blocks=blocks, batch_size=None, reference=reference)
        require_between(0, math.inf, lr=lr, ranking=ranking, margin=margin)
        require_between(0, 1, removed=removed)
        require_whole(2, views=views)
        if momentum == 1:
            raise ConfigError(f"momentum={momentum!r}: give a number below 1.")
        if 1 - (views - 1) * removed <= 0:
            raise ConfigError(f"removed={removed!r}: the last of {views} views would have no patch left.")
        self.views = views
        self.removed = removed
        self.ranking = ranking
        self.margin = margin
        self.info = replace(self.info, passes=(views, views))

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Open the attention of the last block, and adapt the norms of the chosen blocks."""
        view.blocks[-1].open()
        return super().attach(view, setup)

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return Adam over the norms."""
        return torch.optim.Adam(self._norms, lr=self.norm_lr(batch_size), betas=(self.momentum, 0.999))

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Learn from all views of each image in one update."""
        result = engine.gradient(images, self.ranked, forward=lambda images: self.seen(images, engine))
        engine.adapted.update()
        return Step(result.logits, result.used, result.loss)

    def seen(self, images: Tensor, engine: Engine) -> tuple[Tensor, ...]:
        """Return the logits of all views, from the easiest to the hardest."""
        logits, attention = engine.forward_with(engine.view.class_attention, images)
        order = attention.argsort(dim=-1, stable=True)
        return logits, *(self.logits_of(images, kept, engine) for kept in self.kept(order))

    def kept(self, order: Tensor) -> list[Tensor]:
        """Return the patches of the views after the first, given all patches in ascending order of attention."""
        count = order.shape[1]
        return [order[:, : max(1, int(count * (1 - i * self.removed)))].sort(-1).values for i in range(1, self.views)]

    def logits_of(self, images: Tensor, patches: Tensor, engine: Engine) -> Tensor:
        """Return the logits of a view with these patches."""
        return engine.forward(images, lambda images: engine.view.logits_of_patches(images, patches))

    def ranked(self, *views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each sample, and that every sample is kept."""
        entropies = [entropy(view) for view in views]
        losses = torch.zeros_like(entropies[0])
        for easy, hard in combinations(range(len(views)), 2):
            losses = losses - (views[easy].detach().softmax(-1) * views[hard].log_softmax(-1)).sum(-1)
            excess = entropies[easy] - entropies[hard].detach() + self.margin
            losses = losses + self.ranking * excess.relu()  # no gradient at 0 in any version of torch
        return keep_all(losses)
