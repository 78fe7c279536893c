"""FOA: Test-Time Model Adaptation with Only Forward Passes (Niu et al., ICML 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.engine import Engine, entropy, require_finite
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..core.statistics import constants, mean_and_std
from ..errors import require_between, require_whole
from ..models.view import ModelView
from ._alignment import WITHOUT_SPREAD, require_spread
from ._cma import CMA
from ._prompts import new_prompts


@register("foa")
class FOA(Method):
    """Search by forward passes for prompts with certain predictions and class tokens similar to the source.

    CMA-ES draws a population of prompts for every batch. The fitness of a candidate is the sum of the entropies of the
    batch, plus a weight times the batch size / 64 times a distance from the source data: the squared distance of the mean
    and standard deviation of the class token after every block. The best prompts of the last batch are an additional
    candidate outside of the population. The logits are those of the best candidate, after a shift of the input of the head:
    the mean of the source minus a moving average of the mean over all candidates on earlier batches. There is no shift on
    the first batch. The fitness does not include the shift.

        t_b: class token after block b;  mean and std are over the batch, and with index 0 those of the source
        fitness = sum of H(z) + discrepancy B / 64 sum_b (|mean(t_b) - mean0_b|^2 + |std(t_b) - std0_b|^2)
        logits = head(f + f0 - a),  where f are the features with the best prompts, and f0 is the mean of the source
        a <- decay a + (1 - decay) mean of f over the batch and all candidates

    In addition to the batch, the method needs the source statistics "class_tokens", population + 1 forward passes, and
    memory for the covariance of all numbers in the prompts and its root: 85 MB for ViT-B. It needs batches of at least two
    images, because one image has no standard deviation. A stream of single images is refused. A single image at the end of
    another stream is predicted, and nothing is learned from it. A frozen model predicts with the best prompts of the last
    batch and the shift.

    Args:
        prompts: Number of prompt tokens, which follow the class token.
        population: Number of candidates that are drawn for each batch.
        discrepancy: Weight of the distance from the source. The authors use 0.4, and 0.2 on ImageNet-R.
        sigma: Standard deviation of the first candidates, whose mean is zero.
        decay: Share of the moving average that is kept at each step.
        reference: Behave as the authors' released code. It has no quirk to reproduce for batches of two images or more.

    Ours: CMA-ES follows the tutorial of its author. It learns from the candidates that it has drawn, and not from the best
    prompts of the last batch. The random numbers are those of the adapter. Candidates are far from the initial prompts, so
    the guard does not treat their distance as a sign of a collapse.
    """

    info = Info(
        paper="Niu et al., ICML 2024",
        adapts="prompt tokens, and a shift before the head",
        remembers="the covariance of the prompts and its root",
        requires=("features", "blocks"),
        needs=("class_tokens",),
        far_from_source=True,
        quick={"population": 4},
        exceptions={"batch_of_one": "one image has no standard deviation"},
    )

    def __init__(
        self,
        *,
        prompts: int = 3,
        population: int = 27,
        discrepancy: float = 0.4,
        sigma: float = 1.0,
        decay: float = 0.9,
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_whole(1, prompts=prompts)
        require_whole(2, 2**16, population=population)
        require_between(0, math.inf, discrepancy=discrepancy)
        require_between(1e-6, 1e6, sigma=sigma)
        require_between(0, 1, decay=decay)
        self.prompts = prompts
        self.population = population
        self.discrepancy = discrepancy
        self.sigma = sigma
        self.decay = decay
        self.reference = reference
        self.info = replace(self.info, passes=(self.population + 1, 0))

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Insert the prompts, and create the search distribution."""
        view.require_logits_of_head()
        found = setup.statistics_of("class_tokens")
        self.source = constants((found["mean"], found["std"]), view)
        self.best = new_prompts(view, self.prompts, setup.rng)
        view.prompt({0: self.best})
        self.search = CMA(self.best.numel(), self.population, self.sigma).to(view.device)
        self.average: Tensor  # mean input of the head; NaN before the first batch
        self.register_buffer("average", torch.full((view.feature_width,), math.nan, dtype=view.precise, device=view.device))
        return [self.best]

    def optimizer(self, batch_size: int) -> None:
        """Return None, because there is no optimizer, and raise an error if the batch size of the stream is 1."""
        require_spread(self.name, batch_size)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Evaluate a population of prompts on the batch, update the search, and predict with the best candidate."""
        count = engine.ranks.positions(images)[1]
        if count == 1:
            return Step(self.predict(images, engine), event=WITHOUT_SPREAD)
        drawn = self.draw(engine)
        candidates = [*drawn.to(self.best).view(-1, *self.best.shape), self.best.detach().clone()]
        seen = [self.passed(images, candidate, engine) for candidate in candidates]
        # sums over all ranks
        sums = engine.ranks.gather(torch.stack([s for s, _ in seen])[None]).sum(0)
        fitness = self.fitness(sums, count)
        require_finite(fitness)

        best = int(fitness.argmin())
        logits = self.shifted(seen[best][1], engine)
        self.search.tell(drawn, fitness[:-1])
        self.remember(sums[:, 1].mean(0)[-len(self.average) :] / count)
        with torch.no_grad():
            self.best.copy_(candidates[best])
        return Step(logits, used=count, loss=float(fitness[best]))

    def draw(self, engine: Engine) -> Tensor:
        """Draw a population, (population, prompts x width)."""
        return self.search.ask(engine.rng)

    def passed(self, images: Tensor, candidate: Tensor, engine: Engine) -> tuple[Tensor, Tensor]:
        """Pass the images with one candidate, and return sums over the batch and the input of the head.

        The sums are those of the entropies, of the class tokens and of their squares, (3, length).
        """
        with engine.adapted.using([candidate]):
            logits, tokens = engine.class_tokens(images)
        wide = tokens.double()
        total = entropy(logits).double().sum().expand(wide.shape[1])
        return torch.stack([total, wide.sum(0), wide.square().sum(0)]), engine.centred(tokens[:, -len(self.average) :])

    def fitness(self, sums: Tensor, count: int) -> Tensor:
        """Return the fitness of every candidate from its sums over `count` samples; lower is better."""
        entropies, tokens, squares = sums.unbind(1)
        distance = sum(
            (ours - source).square().sum(1) for ours, source in zip(mean_and_std(tokens, squares, count), self.source)
        )
        return entropies[:, 0] + self.discrepancy * count / 64 * distance

    def remember(self, mean: Tensor) -> None:
        """Update the moving average with the mean input of the head."""
        first = bool(self.average.isnan().any())
        self.average.copy_(mean if first else self.decay * self.average + (1 - self.decay) * mean)

    def shifted(self, features: Tensor, engine: Engine) -> Tensor:
        """Return the logits of features that are shifted towards the mean of the source."""
        shift = (self.source[0][-len(self.average) :] - self.average).nan_to_num(0.0)
        with torch.no_grad():
            return engine.classify(features + shift)

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Return the logits of the best prompts of the last batch, with the shift."""
        return self.shifted(engine.features(images)[1], engine)
