"""EATA: Efficient Test-Time Model Adaptation without Forgetting (Niu et al., ICML 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from ..core.engine import Engine, GradientResult
from ..core.method import Setup
from ..core.registry import register
from ..core.statistics import constants, norm_names
from ..errors import require_between
from ..models.view import ModelView
from .eta import ETA


@register("eata")
class EATA(ETA):
    """Minimise the loss of ETA, and keep parameters that are important for the source data near their source values.

    The importance of a parameter is its Fisher information on clean source images. `acclimate.source_statistics` computes it
    once: `acclimate.adapt(model, "eata", source_statistics="stats.safetensors")`. It is kept in the state file.

        loss = loss of `eta` + fisher_weight sum_k F_k (w_k - w0_k)^2,  where w0 are the source parameters
        F_k = mean over source batches of (gradient for w_k of the cross-entropy with the model's own predictions)^2

    Args:
        lr: Learning rate; by default 0.001 for a batch of 64, or 0.00025 if the norms are BatchNorm or GroupNorm,
            proportional to the batch size.
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        redundancy: Cosine similarity with the average prediction from which on a sample is redundant.
        decay: Decay of the average prediction.
        fisher_weight: Weight of the Fisher regulariser. The authors use 2000 for every model, with the Fisher information of
            batches as large as those of the stream (64). The Fisher information of smaller batches is larger, and so is its
            effect.
        momentum: Momentum of SGD.
        batch_size: Batch size for the default learning rate. By default it is that of each batch, and with reference=True
            that of the first batch.
        loss: The loss, which is also compared with the margin: "entropy", or "come", the opinion entropy of COME (Zhang et
            al., ICLR 2025), whose mass of uncertainty is the number of classes.
        reference: Behave as the authors' released code, as in `ETA`.
    """

    info = replace(
        ETA.info,
        needs=("fisher",),
        remembers="an average prediction, and the Fisher information of the norms",
    )

    def __init__(
        self,
        *,
        lr: float | None = None,
        margin: float | None = None,
        redundancy: float = 0.05,
        decay: float = 0.9,
        fisher_weight: float = 2000.0,
        momentum: float = 0.9,
        batch_size: int | None = None,
        loss: str = "entropy",
        reference: bool = False,
    ) -> None:
        super().__init__(
            lr=lr,
            margin=margin,
            redundancy=redundancy,
            decay=decay,
            momentum=momentum,
            batch_size=batch_size,
            loss=loss,
            reference=reference,
        )
        require_between(0, math.inf, fisher_weight=fisher_weight)
        self.fisher_weight = fisher_weight

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Load the Fisher information, and adapt all norms."""
        found = setup.statistics_of("fisher")
        self.fisher = constants((found[name] for name in norm_names(view).values()), view)
        return super().attach(view, setup)

    def regularise(self, result: GradientResult, engine: Engine) -> float:
        """Add the gradient of the Fisher-weighted squared distance from the source, and return that loss.

        It does not depend on the samples.
        """
        moved = [p.detach() - source for p, source in zip(engine.adapted.tensors, engine.adapted.source)]
        pull = [fisher * distance for fisher, distance in zip(self.fisher, moved)]
        engine.adapted.amend_gradient(plus=[2 * self.fisher_weight * force for force in pull])
        return self.fisher_weight * sum(float((force * distance).sum()) for force, distance in zip(pull, moved))
