"""CoTTA: Continual Test-Time Domain Adaptation (Wang et al., CVPR 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.engine import Engine, keep_all
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..errors import require_between, require_whole
from ..models.view import ModelView
from ._augment import noisy_view
from ._teacher import Teacher, require_nesterov, symmetric_cross_entropy, weights_and_biases


@register("cotta")
class CoTTA(Method):
    """Train a student on the predictions of an averaged teacher, and restore a few of its weights to the source.

    The teacher is a moving average of the weights of the student. Its logits from before the update are returned. If the
    source model is unsure of a batch, the logits of the teacher are averaged over augmented views. The loss is the symmetric
    cross entropy between student and teacher, as in the authors' code for ImageNet. After every step, randomly chosen
    weights of the student return to their source values.

        p: prediction of the student w,  t: prediction of the teacher w'
        loss = mean of -1/2 sum_c (t_c ln p_c + p_c ln t_c)
        w' <- teacher_momentum w' + (1 - teacher_momentum) w
        each element of w <- its source value, with the probability `restore`

    The method needs the normalisation of the model, to augment pixels (`adapt(..., mean=, std=)`), and memory for the
    weights of the teacher.

    Args:
        lr: Learning rate; by default the authors' 0.01 if the norms are BatchNorm or GroupNorm, and 0.005 otherwise. The
            authors' code has no ViT. Later papers use 0.005 without Nesterov for ViT-B. With 0.01 and Nesterov a ViT
            collapses.
        momentum: Momentum of SGD.
        nesterov: Whether to use Nesterov's momentum; by default if the norms are BatchNorm or GroupNorm.
        teacher_momentum: Share of the teacher that is kept at each step.
        threshold: Mean confidence of the source model below which the logits are averaged over views.
        views: Number of views.
        restore: Probability with which an element of the student returns to its source value in each step.
        reference: Accepted by every method. The released code assumes that the model itself normalises; here the views are
            made from pixels in either case. In the models of torchvision, its selection by name would leave out the
            projections of the attention; here they are adapted.
    """

    info = Info(
        paper="Wang et al., CVPR 2022",
        adapts="weights and biases of all layers, and their average",
        batch_statistics=True,
        remembers="an average of all weights",
        augments=True,
    )

    def __init__(
        self,
        *,
        lr: float | None = None,
        momentum: float = 0.9,
        nesterov: bool | None = None,
        teacher_momentum: float = 0.999,
        threshold: float = 0.1,
        views: int = 32,
        restore: float = 0.001,
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_between(0, math.inf, optional=True, lr=lr)
        require_between(0, 1, momentum=momentum, teacher_momentum=teacher_momentum, threshold=threshold, restore=restore)
        require_whole(1, views=views)
        require_nesterov(bool(nesterov), momentum)
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self.teacher_momentum = teacher_momentum
        self.threshold = threshold
        self.views = views
        self.restore = restore
        self.reference = reference
        self.info = replace(self.info, passes=(2 + self.views, 1))

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt the weights and biases of all layers, and create the teacher."""
        self._layer_norms = view.kind_of_norm == "layer"
        self._adapted = weights_and_biases(view)
        self.teacher = Teacher(self._adapted)
        return self._adapted

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over all adapted parameters."""
        lr = (0.005 if self._layer_norms else 0.01) if self.lr is None else self.lr
        nesterov = not self._layer_norms and self.momentum > 0 if self.nesterov is None else self.nesterov
        return torch.optim.SGD(self._adapted, lr=lr, momentum=self.momentum, nesterov=nesterov)

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Return the logits of the teacher."""
        return self.teacher.predict(images, engine)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Train the student on the logits of the teacher, update the teacher, and restore a few weights."""
        if self.source_is_unsure(images, engine):
            target = self.mean_over_views(images, engine)
        else:
            target = self.teacher.predict(images, engine)
        result = engine.gradient(images, agreement, extras=[target])
        engine.adapted.update()
        self.teacher.follow(engine.adapted.tensors, self.teacher_momentum)
        self.restore_some(engine)
        return Step(target, used=result.used, loss=result.loss)

    def source_is_unsure(self, images: Tensor, engine: Engine) -> bool:
        """Return whether the mean confidence of the source model is below the threshold."""
        if self.threshold <= 1 / engine.num_classes:
            return False  # no confidence is lower than 1 / classes
        with engine.adapted.using(engine.adapted.source):
            confidence = engine.predict(images).softmax(-1).amax(-1)
        return float(engine.ranks.gather(confidence).mean()) < self.threshold

    def mean_over_views(self, images: Tensor, engine: Engine) -> Tensor:
        """Return the logits of the teacher, averaged over augmented views."""
        positions, total = engine.ranks.positions(images)
        mean = torch.zeros((), device=images.device)
        for _ in range(self.views):
            mean = mean + self.teacher.predict(self.view(images, engine, positions, total), engine) / self.views
        return mean

    def view(self, images: Tensor, engine: Engine, positions: Tensor, total: int) -> Tensor:
        """Return one augmented view of each image."""
        return noisy_view(images, torch.randn(total, *images.shape[1:], generator=engine.rng)[positions], engine)

    @torch.no_grad()
    def restore_some(self, engine: Engine) -> None:
        """Restore randomly chosen elements of the parameters to their source values."""
        for i, (p, source) in enumerate(zip(engine.adapted.tensors, engine.adapted.source)):
            chosen = self.restored(i, p, engine).to(p.device)
            p.put_(chosen, source.take(chosen))

    def restored(self, i: int, p: Tensor, engine: Engine) -> Tensor:
        """Return the positions in the flattened i-th parameter that are restored to the source."""
        return bernoulli_positions(p.numel(), self.restore, engine.rng)


def agreement(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the symmetric cross entropy between student and teacher, and that every sample is kept."""
    loss = symmetric_cross_entropy(logits, target)
    return keep_all(loss)


def bernoulli_positions(count: int, share: float, rng: torch.Generator) -> Tensor:
    """Return the positions that are chosen if each of `count` is chosen independently with probability `share`.

    The gaps between chosen positions have a geometric distribution, so that one random number per chosen position suffices.
    """
    found: list[Tensor] = []
    last = -1
    while share > 0 and last < count:
        expected = share * (count - last)
        draws = 1 - torch.rand(math.ceil(expected + 4 * math.sqrt(expected)) + 8, generator=rng, dtype=torch.float64)
        gaps = 1 + (draws.log() / math.log1p(-share)).floor() if share < 1 else torch.ones_like(draws)
        found.append(last + gaps.cumsum(0))
        last = int(found[-1][-1])
    positions = torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)
    return positions[positions < count].long()
