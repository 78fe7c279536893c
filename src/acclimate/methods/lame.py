"""LAME: Parameter-free Online Test-time Adaptation (Boudiaf et al., CVPR 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.engine import Engine, require_finite
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..errors import ConfigError, require_between, require_whole
from ..models.view import ModelView

AFFINITIES = ("rbf", "knn")


@register("lame")
class LAME(Method):
    """Correct the predictions of a batch so that samples with similar features agree; the model does not change.

    The corrected probabilities minimise their divergence from those of the model, minus the affinity-weighted agreement of
    the samples (Laplacian regularisation). They are computed by a fixed-point iteration. The method is made for batches with
    few classes. On i.i.d. batches of many classes it reduces the accuracy by design. A single sample gets the prediction of
    the source model. For the Gaussian affinity this is our choice, because its bandwidth is undefined there.

        p_i: prediction of sample i;  a_ij: affinity of the samples i and j
        y_i <- softmax(ln p_i + weight sum_j a_ij y_j),  from y_i = p_i on, until y does not change

    The method needs only the batch and has no memory. If a model has no linear head, its logits take the place of the
    features (ours). The adapter returns the logarithm of the corrected probabilities, which can be used as logits, because
    its softmax is these probabilities.

    Args:
        affinity: "rbf", a Gaussian of the distance between normalised features, whose bandwidth is the mean distance to the
            k-th nearest sample, where the first is the sample itself; or "knn", 1 for the k nearest other samples.
        neighbours: The number k of nearest samples.
        symmetric: Whether to average the affinity with its transpose.
        weight: Weight of the agreement, relative to the predictions of the model.
        max_iterations: Largest number of updates per batch. The iteration stops earlier when the relative change of the
            energy is at most 1e-8.
        reference: Accepted by every method. The released code has no quirk except that it returns probabilities.
    """

    info = Info(paper="Boudiaf et al., CVPR 2022", adapts="predictions of a batch")

    def __init__(
        self,
        *,
        affinity: str = "rbf",
        neighbours: int = 5,
        symmetric: bool = False,
        weight: float = 1.0,
        max_iterations: int = 100,
        reference: bool = False,
    ) -> None:
        super().__init__()
        if affinity not in AFFINITIES:
            raise ConfigError(f"affinity={affinity!r}: choose one of {', '.join(AFFINITIES)}.")
        require_whole(1, neighbours=neighbours, max_iterations=max_iterations)
        require_between(0, math.inf, weight=weight)
        self.affinity = affinity
        self.neighbours = neighbours
        self.symmetric = symmetric
        self.weight = weight
        self.max_iterations = max_iterations
        self.reference = reference

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Look for features, and adapt no parameter."""
        self._has_features = "features" in view.parts
        return []

    def outputs(self, images: Tensor, engine: Engine) -> tuple[Tensor, Tensor]:
        """Return the logits of a batch, and its features."""
        if self._has_features:
            return engine.features(images)
        logits = engine.predict(images)
        return logits, logits

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Correct the predictions of the batch, over all ranks."""
        logits, features = self.outputs(images, engine)
        require_finite(logits, features)
        mine, _ = engine.ranks.positions(images)
        return Step(self.correct(engine.ranks.gather(logits), engine.ranks.gather(features))[mine])

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Correct the predictions of the images of this rank."""
        return self.correct(*self.outputs(images, engine))

    @torch.no_grad()
    def correct(self, logits: Tensor, features: Tensor) -> Tensor:
        """Return the logarithm of the corrected probabilities of a batch."""
        log_p = (logits.softmax(-1) + 1e-10).log()
        affinity = self.weight * self.affinities(F.normalize(features.to(logits), dim=-1))
        log_y = log_p.log_softmax(-1)
        last = math.inf
        for i in range(self.max_iterations):
            log_y = (log_p + affinity @ log_y.exp()).log_softmax(-1)
            y = log_y.exp()
            energy = float((y * (log_y - log_p - affinity @ y)).sum())
            if i > 1 and abs(energy - last) <= 1e-8 * abs(last):
                break
            last = energy
        return log_y

    def affinities(self, directions: Tensor) -> Tensor:
        """Return the affinity of every pair of samples, (batch, batch)."""
        count = len(directions)
        if count == 1:
            return directions.new_zeros(1, 1)
        # not from the Gram matrix, whose rounding errors are too large for near neighbours
        distances = torch.cdist(directions, directions, compute_mode="donot_use_mm_for_euclid_dist")
        if self.affinity == "rbf":
            bandwidth = distances.kthvalue(min(self.neighbours, count)).values.mean()
            tiny = torch.finfo(distances.dtype).tiny  # for the case that all samples are equal
            affinity = (-(distances**2) / (2 * bandwidth**2).clamp_min(tiny)).exp()
        else:
            distances.fill_diagonal_(-1)  # the sample itself is the first, even if another one is equal
            nearest = distances.topk(min(self.neighbours + 1, count), largest=False).indices[:, 1:]
            affinity = torch.zeros_like(distances).scatter_(1, nearest, 1.0)
        return (affinity + affinity.T) / 2 if self.symmetric else affinity
