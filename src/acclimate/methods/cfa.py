"""CFA: Robustifying Vision Transformer without Retraining from Scratch by Test-Time Class-Conditional Feature Alignment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.engine import Engine
from ..core.method import Setup, Step
from ..core.parameters import global_norm
from ..core.registry import register
from ..core.statistics import constants, squashed
from ..errors import require_between, require_whole
from ..models.view import ModelView
from ._alignment import align
from .tent import Tent

RANGE = 2.0  # range of a feature after tanh, from -1 to 1; distances of k-th moments are divided by its k-th power
MOST_MOMENTS = 3  # number of moments in the source statistics


@register("cfa")
class CFA(Tent):
    """Align the features of a batch with those of the source by their central moments and class means.

    Features are the input of the head, normalised and passed through tanh. The loss has two parts: the distances of their
    mean and central moments from those of the source, and the distances of the means of the predicted classes from the
    source means of the same classes, averaged over the classes. The gradient is clipped. A batch of 1 has no central
    moments: all of them are 0.

        h = tanh(normalised features);  m_1 = mean of h,  m_k = mean of (h - m_1)^k,  s_k: those of the source
        u_c = mean of h over the samples that are predicted as c,  v_c: mean of class c in the source
        loss = moment_weight sum_k |m_k - s_k| / 2^k + class_weight (mean over predicted c of |u_c - v_c| / 2)

    The moments and class means of the source are those of clean labelled images (the authors use the training set of
    ImageNet). `acclimate.source_statistics` computes them once: `acclimate.adapt(model, "cfa",
    source_statistics="stats.safetensors")`. They are kept in the state file. The method also needs a second forward pass.

    Args:
        lr: Learning rate. That of the authors does not depend on the batch size.
        moments: Number of moments that are compared, 1 to 3: the mean, and the central moments up to this order.
        moment_weight: Weight of the distance of the moments.
        class_weight: Weight of the distance of the class means.
        clip: Norm to which the gradient of all parameters together is clipped.
        momentum: Momentum of SGD.
        reference: Accepted by every method. The one quirk of the authors' released code is not reproduced: its loss is NaN
            for every batch if a class has no source image.

    Ours: a predicted class without source images is left out of the class means. Source images without labels count for
    their predicted class.
    """

    info = replace(
        Tent.info,
        paper="Kojima et al., IJCAI 2022",
        remembers="moments and class means of the source",
        requires=("norms", "features"),
        batch_statistics=False,
        needs=("features",),
        passes=(2, 1),
    )

    def __init__(
        self,
        *,
        lr: float = 0.001,
        moments: int = 3,
        moment_weight: float = 1.0,
        class_weight: float = 1.0,
        clip: float = 1.0,
        momentum: float = 0.9,
        reference: bool = False,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, reference=reference)
        require_between(0, math.inf, lr=lr, moment_weight=moment_weight, class_weight=class_weight, clip=clip)
        require_whole(1, moments=moments)
        require_between(1, MOST_MOMENTS, moments=moments)
        self.moments = moments
        self.moment_weight = moment_weight
        self.class_weight = class_weight
        self.clip = clip

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Load the source statistics, and adapt all norms."""
        found = setup.statistics_of("features")
        self.source_moments = constants((found[name] for name in ("mean", "moment2", "moment3")), view)
        self.source_classes = constants((found[name] for name in ("class_means", "class_counts")), view)
        return super().attach(view, setup)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Align the features of the batch with the source in one update, by two passes."""

        def distance(features: Tensor, logits: Tensor) -> Tensor:
            return self.distance(features, logits, engine)

        # features without a centre that the adapter subtracts, as those of the source statistics
        aligned = align(images, engine, lambda part: engine.forward_with(engine.view.features, part), distance)
        self.shorten(engine)
        engine.adapted.update()
        return aligned

    def distance(self, features: Tensor, logits: Tensor, engine: Engine) -> Tensor:
        """Return the loss of a batch."""
        hidden = squashed(features)
        loss = self.moment_weight * self.moment_distance(hidden)
        return loss + self.class_weight * self.class_distance(hidden, logits.argmax(-1), engine)

    def moment_distance(self, hidden: Tensor) -> Tensor:
        """Return the distance of the mean and the central moments from those of the source."""
        mean = hidden.mean(0)
        ours = [mean, *((hidden - mean).pow(k).mean(0) for k in range(2, self.moments + 1))]
        distances = [(a - b).norm() / RANGE**k for k, (a, b) in enumerate(zip(ours, self.source_moments), start=1)]
        return torch.stack(distances).sum()

    def class_distance(self, hidden: Tensor, labels: Tensor, engine: Engine) -> Tensor:
        """Return the mean distance of the means of the predicted classes from those of the source.

        It is 0 if the source has images of none of these classes.
        """
        means, counts = self.source_classes
        if engine.classes is not None:
            means, counts = means[engine.classes], counts[engine.classes]
        members = F.one_hot(labels, engine.num_classes).T.to(hidden)
        members, means = (rows[(members.sum(1) > 0) & (counts > 0)] for rows in (members, means))
        distances = (members @ hidden / members.sum(1, keepdim=True) - means).norm(dim=-1) / RANGE
        return distances.sum() / max(len(distances), 1)

    def shorten(self, engine: Engine) -> float:
        """Clip the gradient, and return the norm that it had before."""
        length = float(global_norm([p.grad for p in engine.adapted.tensors if p.grad is not None]))
        engine.adapted.amend_gradient(times=min(1.0, self.clip / (length + 1e-6)))
        return length
