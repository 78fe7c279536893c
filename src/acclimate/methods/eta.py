"""ETA: Efficient Test-Time Model Adaptation without Forgetting (Niu et al., ICML 2022), without its Fisher regulariser."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.engine import Engine, GradientResult
from ..core.method import Setup, Step
from ..core.registry import register
from ..errors import require_between
from ..models.view import ModelView
from ._losses import reliable_margin, uncertainty
from ._predictions import nothing_yet
from .tent import Tent


@register("eta")
class ETA(Tent):
    """Minimise the entropy of samples that are reliable and not redundant, over all norms.

    A sample is reliable if its entropy is below a margin. It is redundant if its prediction is similar to the moving average
    of the predictions of the samples that the method has learned from. Of the remaining samples, those with lower entropy
    have more weight. If no sample remains, nothing changes, including the momentum. The method needs only the batch.

        p = softmax(z),  H(z): entropy of p,  m: average prediction
        S = the samples with H(z) < margin and |cos(m, p)| < redundancy
        loss = mean of exp(margin - H(z)) H(z) over S,  with a constant weight in the gradient
        m <- decay m + (1 - decay) mean of p over S

    Args:
        lr: Learning rate; by default 0.001 for a batch of 64, or 0.00025 if the norms are BatchNorm or GroupNorm,
            proportional to the batch size. The paper has only ResNet-50. Later papers use 0.001 for ViT-B.
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        redundancy: Cosine similarity with the average prediction from which on a sample is redundant.
        decay: Decay of the average prediction.
        momentum: Momentum of SGD.
        batch_size: Batch size for the default learning rate. By default it is that of each batch, and with reference=True
            that of the first batch.
        loss: The loss, which is also compared with the margin: "entropy", or "come", the opinion entropy of COME (Zhang et
            al., ICLR 2025), whose mass of uncertainty is the number of classes.
        reference: Behave as the authors' released code: the default margin counts all classes of the head. The mass of
            uncertainty of COME is 1000.
    """

    info = replace(Tent.info, paper="Niu et al., ICML 2022", remembers="an average prediction")

    def __init__(
        self,
        *,
        lr: float | None = None,
        margin: float | None = None,
        redundancy: float = 0.05,
        decay: float = 0.9,
        momentum: float = 0.9,
        batch_size: int | None = None,
        loss: str = "entropy",
        reference: bool = False,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, batch_size=batch_size, loss=loss, reference=reference)
        require_between(0, math.inf, optional=True, margin=margin)
        require_between(0, math.inf, redundancy=redundancy)
        require_between(0, 1, decay=decay)
        self.margin = margin
        self.redundancy = redundancy
        self.decay = decay
        self.average: Tensor  # mean prediction of the samples learned from; NaN before the first one

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt all norms, and create the average prediction."""
        self.register_buffer("average", nothing_yet(view))
        return super().attach(view, setup)

    def average_prediction(self, engine: Engine) -> Tensor | None:
        """Return the average prediction over the classes of the target, or None before the first update."""
        average = self.average[: engine.num_classes]
        return None if average.isnan().any() else average

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Learn from the reliable and non-redundant samples in one update."""
        average = self.average_prediction(engine)
        return self.learn(self.look(images, engine, average), engine, average)

    def look(self, images: Tensor, engine: Engine, average: Tensor | None) -> GradientResult:
        """Compute the gradient of the weighted entropy of the reliable and non-redundant samples."""
        measure = uncertainty(self.loss, engine, reference=self.reference)
        margin = reliable_margin(engine, all_classes=self.reference) if self.margin is None else self.margin

        def weighted_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
            h = measure(logits)
            kept = h.detach() < margin
            if average is not None:
                similarity = F.cosine_similarity(average[None], logits.detach().softmax(-1))
                kept &= similarity.abs() < self.redundant_from(engine)
            return (margin - h.detach()).exp() * h, kept

        return engine.gradient(images, weighted_entropy, selective=True)

    def learn(self, result: GradientResult, engine: Engine, average: Tensor | None) -> Step:
        """Update the parameters and the average prediction, unless no sample was kept."""
        if not result.used:
            return Step(result.logits)
        new = engine.ranks.gather(result.logits[result.kept].softmax(-1)).mean(0)
        if average is not None:
            new = self.decay * average + (1 - self.decay) * new
        loss = result.loss + self.regularise(result, engine)
        engine.adapted.update()
        self.average[: engine.num_classes] = new
        return Step(result.logits, result.used, loss)

    def redundant_from(self, engine: Engine) -> float:
        """Return the similarity from which on a sample is redundant."""
        return self.redundancy

    def regularise(self, result: GradientResult, engine: Engine) -> float:
        """Amend the gradient before the update, and return the loss of a regulariser.

        ETA has no regulariser; subclasses may add one.
        """
        return 0.0
