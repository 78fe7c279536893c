"""CMA-ES, an evolution strategy that adapts the covariance of its search distribution.

The implementation follows Hansen, "The CMA Evolution Strategy: A Tutorial", arXiv 1604.00772.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..core.statecheck import COUNT


class CMA(nn.Module):
    """A normal distribution whose mean, scale and covariance adapt towards candidates of low cost.

    All of its state is in buffers. The parameters have the defaults of the tutorial, including negative weights for the
    worse half of a population. The covariance is decomposed only as often as its slow change requires, so that the
    decomposition adds little to the cost of an update.

    Args:
        dimension: The dimension of the search space.
        population: The number of candidates in a generation.
        sigma: The initial standard deviation. The initial mean is zero.
    """

    def __init__(self, dimension: int, population: int, sigma: float) -> None:
        super().__init__()
        self.dimension = n = dimension
        self.population = population
        raw = [math.log((population + 1) / 2) - math.log(rank) for rank in range(1, population + 1)]
        self.parents = population // 2
        good, bad = raw[: self.parents], raw[self.parents :]
        self.mass = mass = _effective(good)
        self.rate_sigma = (mass + 2) / (n + mass + 5)
        self.damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (n + 1)) - 1) + self.rate_sigma
        self.rate_path = (4 + mass / n) / (n + 4 + 2 * mass / n)
        self.rate_one = 2 / ((n + 1.3) ** 2 + mass)
        many = 2 * (0.25 + mass - 2 + 1 / mass) / ((n + 2) ** 2 + mass)
        self.rate_many = min(1 - self.rate_one, many)
        self.usual_length = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))  # expected length of a standard normal vector
        self.gap = 1 / ((self.rate_one + self.rate_many) * n * 10)  # generations between decompositions
        # bounds: the negative weights remove at most what the positive ones add, and the covariance stays definite
        negative = min(
            1 + self.rate_one / self.rate_many,
            1 + 2 * _effective(bad) / (mass + 2),
            (1 - self.rate_one - self.rate_many) / (n * self.rate_many),
        )
        self.weights = [w / sum(good) for w in good] + [negative * w / -sum(bad) for w in bad]

        self.mean: Tensor
        self.sigma: Tensor
        self.path: Tensor
        self.path_sigma: Tensor
        self.covariance: Tensor
        self.root: Tensor
        self.generation: Tensor
        self.decomposed: Tensor
        zeros = torch.zeros(n, dtype=torch.float64)
        self.register_buffer("mean", zeros.clone())
        self.register_buffer("sigma", zeros.new_tensor(sigma))
        self.register_buffer("path", zeros.clone())
        self.register_buffer("path_sigma", zeros.clone())
        self.register_buffer("covariance", zeros.new_zeros(n, n).fill_diagonal_(1))
        # The symmetric root of the covariance at its last decomposition. It is unique. Eigenvectors of equal eigenvalues are
        # not: they would change with every rounding error.
        self.register_buffer("root", self.covariance.clone())
        self.register_buffer("generation", torch.tensor(0))
        self.register_buffer("decomposed", torch.tensor(0))  # generation of the last decomposition
        self.ranges = {"generation": COUNT, "decomposed": COUNT, "sigma": (1e-300, math.inf)}

    def ask(self, rng: torch.Generator) -> Tensor:
        """Draw a generation of candidates, (population, dimension)."""
        draws = torch.randn(self.population, self.dimension, generator=rng, dtype=torch.float64).to(self.mean.device)
        return self.mean + self.sigma * draws @ self.root

    @torch.no_grad()
    def tell(self, candidates: Tensor, costs: Tensor) -> None:
        """Update the distribution from the costs of a population; if this fails, nothing has changed."""
        order = costs.argsort(stable=True)
        steps = (candidates.to(self.mean)[order] - self.mean) / self.sigma
        weights = steps.new_tensor(self.weights)
        move = weights[: self.parents] @ steps[: self.parents]
        generation = int(self.generation) + 1

        keep, pull = 1 - self.rate_sigma, math.sqrt(self.rate_sigma * (2 - self.rate_sigma) * self.mass)
        # in coordinates in which the distribution is standard normal
        plain = torch.linalg.solve(self.root, torch.cat([steps, move[None]]).T).T
        path_sigma = keep * self.path_sigma + pull * plain[-1]
        stretch = float(path_sigma.norm()) / self.usual_length
        sigma = self.sigma * math.exp(min(1.0, self.rate_sigma / self.damping * (stretch - 1)))

        # While sigma is about to grow, the other path is not updated, so that the covariance does not grow instead of sigma.
        growing = stretch / math.sqrt(1 - keep ** (2 * generation)) >= 1.4 + 2 / (self.dimension + 1)
        keep, pull = 1 - self.rate_path, math.sqrt(self.rate_path * (2 - self.rate_path) * self.mass)
        path = keep * self.path + (0.0 if growing else pull) * move

        lengths = plain[:-1].square().sum(1).clamp(min=1e-300)
        shares = torch.where(weights < 0, weights * self.dimension / lengths, weights)
        stays = 1 - self.rate_one - self.rate_many * float(weights.sum())
        stays += self.rate_one * self.rate_path * (2 - self.rate_path) * growing
        covariance = stays * self.covariance + self.rate_one * torch.outer(path, path)
        covariance += self.rate_many * (steps.T * shares) @ steps
        covariance = (covariance + covariance.T) / 2  # removes the asymmetry of rounding errors

        if generation - int(self.decomposed) > self.gap:
            squares, axes = torch.linalg.eigh(covariance)
            self.root.copy_((axes * squares.clamp(min=1e-20 * float(squares[-1])).sqrt()) @ axes.T)
            self.decomposed.fill_(generation)
        self.mean += self.sigma * move
        self.sigma.copy_(sigma)
        self.path.copy_(path)
        self.path_sigma.copy_(path_sigma)
        self.covariance.copy_(covariance)
        self.generation.fill_(generation)


def _effective(weights: list[float]) -> float:
    """Return the effective number of weights, (sum w)^2 / sum w^2."""
    return sum(weights) ** 2 / sum(w**2 for w in weights)
