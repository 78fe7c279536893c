"""MEMO: Test Time Robustness via Adaptation and Augmentation (Zhang et al., NeurIPS 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.engine import Engine, keep_all
from ..core.method import RESNET_LR, Info, Method, Setup, Step
from ..core.registry import register
from ..errors import require_between, require_whole
from ..models.view import ModelView
from ._augment import augmix

PRIOR = 16  # images that the statistics of a BatchNorm count as, and one image counts as 1


@register("memo")
class MEMO(Method):
    """Minimise the entropy of the mean prediction over augmented views of each image, and then predict that image.

    Every image starts from the source weights. Therefore neither the order of a stream nor its division into batches
    matters: the images of a batch are processed one by one. The logits come from after the update. A frozen call predicts
    with the source weights.

        m = mean of softmax(z) over the views of an image
        loss = -sum_c m_c ln m_c
        w <- step from the source weights;  prediction = softmax(z(image)) with w

    The method needs the normalisation of the model, to augment pixels (`adapt(..., mean=, std=)`). An image costs as much as
    two batches of its views: one pass for their mean prediction, and one for the gradient, which needs the memory of a
    micro-batch. A BatchNorm mixes the statistics of the source with those of the images that it gets, 16 to 1, as the
    authors do. Weights in float16 are refused, because the squared gradients of Adam are too small for it.

    Args:
        lr: Learning rate; by default 1e-5 with AdamW, or 0.00025 with SGD if the norms are BatchNorm or GroupNorm. These are
            the authors' values for a transformer (RVT) and for ResNet-50. There is no published value for ViT-B.
        weight_decay: Weight decay of AdamW, the authors' for a transformer. SGD has none.
        views: Number of augmented views per image, made by AugMix.
        iterations: Number of updates per image, each with its own views.
        leak_optimizer_state: Whether to keep the moments and the step count of AdamW from image to image, as the released
            code does. By default only with `reference`.
        reference: Behave as the authors' released code: the state of the optimizer is kept.
    """

    info = Info(
        paper="Zhang et al., NeurIPS 2022",
        adapts="all parameters, for each image anew",
        augments=True,
        float16=False,
        predicts_after=True,
        quick={"views": 2},
        exceptions={
            "micro_batches_do_not_matter": "AdamW divides by the size of the gradient, so that a parameter on which nothing "
            "depends (a key's bias) moves by rounding errors",
        },
    )

    def __init__(
        self,
        *,
        lr: float | None = None,
        weight_decay: float = 0.01,
        views: int = 64,
        iterations: int = 1,
        leak_optimizer_state: bool | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_between(0, math.inf, optional=True, lr=lr)
        require_between(0, math.inf, weight_decay=weight_decay)
        require_whole(1, views=views, iterations=iterations)
        self.lr = lr
        self.weight_decay = weight_decay
        self.views = views
        self.iterations = iterations
        self.leak_optimizer_state = leak_optimizer_state
        self.reference = reference
        self.info = replace(self.info, passes=(2 * self.views * self.iterations + 1, self.views * self.iterations))

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt all parameters, and let BatchNorm mix the statistics of the source with those of an image, 16 to 1."""
        self._layer_norms = view.kind_of_norm == "layer"
        view.mix_statistics(PRIOR, images=1)
        self._adapted = [p for p in view.model.parameters() if p.is_floating_point()]
        return self._adapted

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return AdamW over all parameters, or SGD for BatchNorm and GroupNorm."""
        if self._layer_norms:
            lr = 1e-5 if self.lr is None else self.lr
            return torch.optim.AdamW(self._adapted, lr=lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(self._adapted, lr=RESNET_LR if self.lr is None else self.lr)

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Return the logits of the source model."""
        with engine.adapted.using(engine.adapted.source):
            return engine.predict(images)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Adapt to each image on its own, starting from the source weights, and predict it."""
        leak = self.reference if self.leak_optimizer_state is None else self.leak_optimizer_state
        logits, losses = [], []
        batch = engine.ranks.gather(images)  # the views of an image are divided over the ranks, not the images
        for image in batch:
            engine.adapted.restore(keep_momentum=leak)
            for _ in range(self.iterations):
                losses.append(self.learn(self.augmented(image, engine), engine))
            logits.append(engine.predict(image[None]))
        positions, total = engine.ranks.positions(images)
        return Step(torch.cat(logits)[positions], used=total, loss=sum(losses) / len(losses))

    def augmented(self, image: Tensor, engine: Engine) -> Tensor:
        """Return the augmented views of one image."""
        pixels = engine.to_pixels(image)
        return engine.from_pixels(torch.stack([augmix(pixels, engine.rng) for _ in range(self.views)]))

    def learn(self, views: Tensor, engine: Engine) -> float:
        """Minimise the entropy of the mean prediction in one update, and return the loss.

        Let q be the mean of the predictions p of the views. Then -sum p log q has the mean of the entropy of q and, since
        the entries of each p sum to 1, also its gradient. It is a loss of each view.
        """
        mine = engine.ranks.share(views)
        log_p = engine.ranks.gather(engine.predict(mine)).log_softmax(-1)
        log_q = log_p.logsumexp(0) - math.log(len(log_p))

        def against_the_mean(logits: Tensor) -> tuple[Tensor, Tensor]:
            loss = -(logits.softmax(-1) * log_q).sum(-1)
            return keep_all(loss)

        result = engine.gradient(mine, against_the_mean)
        engine.adapted.update()
        return result.loss
