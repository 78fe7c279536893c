"""LAME: Parameter-free Online Test-time Adaptation (Boudiaf et al., CVPR 2022)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.engine import Engine, require_finite
from ..core.method import Info, Method, Step
from ..core.registry import register
from ..errors import ConfigError, require_between, require_whole

AFFINITIES = ("rbf", "knn")


@register("lame")
class LAME(Method):
    """Correct the predictions of a batch so that samples with similar features agree; the model stays as it is.

    The corrected probabilities minimise their divergence from the model's own, less the affinity-weighted agreement of
    the samples (Laplacian regularisation), by a fixed-point iteration. Made for batches in which few classes occur; on
    i.i.d. batches of many classes it does harm by design. A sample on its own is predicted as by the source model (for
    the Gaussian affinity that choice is ours: its bandwidth is undefined there).

    It needs nothing beyond the batch and remembers nothing. The adapter returns the logarithm of the corrected
    probabilities, whose softmax they are, so that it can be used as logits.

    Args:
        affinity: "rbf", a Gaussian of the distance between features of length 1, whose bandwidth is the mean distance to
            the k-th nearest sample, the sample itself being the first; or "knn", 1 for the k nearest other samples.
        neighbours: That k.
        symmetric: Average the affinity with its transpose.
        weight: Of the agreement, against the model's own predictions.
        max_iterations: Most updates per batch; it stops earlier when the energy changes by less than 1e-8 of itself.
        reference: Accepted by every method; the released code has no quirk beyond returning probabilities.
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

    def step(self, images: Tensor, engine: Engine) -> Step:
        logits, features = engine.features(images)
        require_finite(logits, features)
        mine, _ = engine.ranks.positions(images)
        return Step(self.correct(engine.ranks.gather(logits), engine.ranks.gather(features))[mine])

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        return self.correct(*engine.features(images))

    @torch.no_grad()
    def correct(self, logits: Tensor, features: Tensor) -> Tensor:
        """Logarithm of the corrected probabilities of a batch."""
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
        """Of every pair of samples, (batch, batch)."""
        count = len(directions)
        if count == 1:
            return directions.new_zeros(1, 1)
        # not from the Gram matrix, which loses the digits that tell near neighbours apart
        distances = torch.cdist(directions, directions, compute_mode="donot_use_mm_for_euclid_dist")
        if self.affinity == "rbf":
            bandwidth = distances.kthvalue(min(self.neighbours, count)).values.mean()
            tiny = torch.finfo(distances.dtype).tiny  # if all samples are equal
            affinity = (-(distances**2) / (2 * bandwidth**2).clamp_min(tiny)).exp()
        else:
            distances.fill_diagonal_(-1)  # itself comes first, also beside an equal sample
            nearest = distances.topk(min(self.neighbours + 1, count), largest=False).indices[:, 1:]
            affinity = torch.zeros_like(distances).scatter_(1, nearest, 1.0)
        return (affinity + affinity.T) / 2 if self.symmetric else affinity
