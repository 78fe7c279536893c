"""NEO: No-Optimization Test-Time Adaptation through Latent Re-Centering (Murphy et al., ICLR 2026)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..core.engine import Engine, require_finite
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..errors import require_between
from ..models.view import ModelView


@register("neo")
class NEO(Method):
    """Subtract the mean feature of the stream before the head.

    No parameter changes. Features are the input of the head, and the centre is their mean over all samples so far, including
    the batch that is being predicted. The first prediction of a stream of single images is therefore the bias of the head,
    and the next few are not reliable. In a stream of a single class, the centre contains this class. In addition to the
    batch, the method needs only the centre, one vector.

        c <- mean of all features so far;  with alpha:  c <- (1 - alpha) c + alpha mean of f over the batch
        z = head(f - c)

    Args:
        alpha: Weight of each batch in an exponential average, which is then the centre (NEO-Continual; the authors use 0.1).
            The average starts at zero and has no correction of that. By default the centre is the mean of all samples.
        reference: Behave as the authors' released code. It has no quirk to reproduce.
    """

    info = Info(
        paper="Murphy et al., ICLR 2026",
        adapts="a shift before the head",
        requires=("features",),
        remembers="the mean feature",
        predicts_after=True,
    )

    def __init__(self, *, alpha: float | None = None, reference: bool = False) -> None:
        super().__init__()
        require_between(0, 1, optional=True, alpha=alpha)
        self.alpha = alpha
        self.reference = reference
        self.centre: Tensor
        self.count: Tensor

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Create a centre of zero, and adapt no parameter."""
        view.require_logits_of_head()
        self.register_buffer("centre", torch.zeros(view.feature_width, dtype=view.precise, device=view.device))
        self.register_buffer("count", torch.tensor(0))  # number of samples in the centre
        return []

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Move the centre towards the features of the batch, and predict with the new centre."""
        _, features = engine.features(images)
        everybody = engine.ranks.gather(features)
        require_finite(everybody)
        self.count += len(everybody)
        share = len(everybody) / int(self.count) if self.alpha is None else self.alpha
        self.centre.copy_((1 - share) * self.centre + share * everybody.mean(0))
        return Step(self.centred(features, engine), used=len(everybody))

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Return the logits with the current centre."""
        return self.centred(engine.features(images)[1], engine)

    @torch.no_grad()
    def centred(self, features: Tensor, engine: Engine) -> Tensor:
        """Return the logits of features from which the centre is subtracted."""
        return engine.classify(features - self.centre)
