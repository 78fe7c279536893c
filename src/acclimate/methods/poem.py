"""POEM: Protected Test-Time Adaptation via Online Entropy Matching, a betting approach (Bar et al., NeurIPS 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..core.engine import Engine, entropy, keep_all, require_finite
from ..core.method import Info, Setup, Step
from ..core.registry import register
from ..core.statistics import constants
from ..errors import require_between, require_whole
from ..models.view import ModelView, parameters_of
from ._leading import LeadingNorms, final_norms
from ._losses import reliable_margin

MOST_WEALTH = 200 * math.log(10)  # a wealth of 1e200
LEAST_GROWTH = 1e-9  # a bet of 2 or more, which bet_limit and gamma may allow, could lose all


@register("poem")
class POEM(LeadingNorms):
    """Match the distribution of the entropies of the stream with that of the source, with targets from a betting process.

    F(h) is the distribution of the entropies of source images, and u = F(h) is uniform as long as the stream is like the
    source. A gambler bets against this, with a bet e that is learned online: the wealth is multiplied by 1 + e (u - 1/2), so
    that a large wealth is evidence of a shift. The bet bends u to u + e (u^2 - u) / 2, and F^-1 maps the result back to the
    target entropy of the sample. The loss is the squared distance of entropy and target. The samples of a batch are bet on
    in their order.

        z = logits / temperature,  u = F(H(z)),  u' = u + e (u^2 - u) / 2,  target = F^-1(u')
        wealth <- wealth (1 + e (u - 1/2));  e <- gradient step that makes ln(wealth) larger
        loss = mean over H(z) < margin of (exp(margin - H(z)) (H(z) - target))^2 / 2,  with a constant weight

    The distribution is that of clean source images (the authors use a quarter of the validation set of ImageNet), which are
    not in the stream. `acclimate.source_statistics` computes it once: `acclimate.adapt(model, "poem",
    source_statistics="stats.safetensors")`. It is kept in the state file. The method also needs a second forward pass.

    Args:
        lr: Learning rate of the norms; by default 0.001 for a batch of 64, proportional to the batch size.
        temperature: Divisor of all logits, including those that are returned: the authors' for ViT-B (0.9 for ResNet-50).
        margin: Entropy, in nats, below which a sample is reliable; by default 0.4 ln C for C classes.
        reweighted: Whether to learn from reliable samples only, with entropy and target multiplied by exp(margin - entropy).
            Otherwise all samples count alike, as in the authors' experiments on CIFAR and Office-Home.
        gamma: Step size of the bet.
        bet_limit: Size of the bet from which on it does not grow. One step may exceed it, by up to gamma.
        delay: Number of samples, including the current batch, before which nothing is learned. The bet is.
        momentum: Momentum of SGD.
        blocks: Blocks that adapt: a number (the first blocks) or indices. By default all but the last quarter, of which at
            most three are left out (9 of 12, 21 of 24).
        batch_size: Batch size for the default learning rate. By default it is that of each batch, and with reference=True
            that of the first batch.
        reference: Behave as the authors' released code: the norm after the last block also adapts, because the selection by
            name misses it; momentum moves the parameters when no sample is reliable; the margin counts all classes of the
            head; and the selection leaves out blocks 9 to 11 of a 24-block model instead of the last three.

    Ours: with a subset of the classes, the entropies of the source images are those over the same subset.
    """

    info = Info(
        paper="Bar et al., NeurIPS 2024",
        adapts="norms of all but the last blocks",
        requires=("norms",),
        batch_statistics=True,
        remembers="a bet and its wealth, and the entropies of source images",
        needs=("logits",),
        passes=(2, 1),
        quick={"delay": 10, "lr": 0.05},
    )
    single_sample_lr_factor = 1

    def __init__(
        self,
        *,
        lr: float | None = None,
        temperature: float = 1.025,
        margin: float | None = None,
        reweighted: bool = True,
        gamma: float = 1 / (8 * math.sqrt(3)),
        bet_limit: float = 1.8,
        delay: int = 100,
        momentum: float = 0.9,
        blocks: int | Sequence[int] | None = None,
        batch_size: int | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__(lr=lr, momentum=momentum, blocks=blocks, batch_size=batch_size, reference=reference)
        require_between(1e-6, 1e6, temperature=temperature)
        require_between(0, math.inf, optional=True, margin=margin)
        require_between(0, 2, gamma=gamma, bet_limit=bet_limit)
        require_whole(0, delay=delay)
        self.temperature = temperature
        self.margin = margin
        self.reweighted = bool(reweighted)
        self.gamma = gamma
        self.bet_limit = bet_limit
        self.delay = delay
        self.bet: Tensor
        self.squares: Tensor
        self.log_wealth: Tensor
        self.seen: Tensor
        self.register_buffer("bet", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("squares", torch.tensor(0.0, dtype=torch.float64))  # sum of the squared gradients of the bet
        self.register_buffer("log_wealth", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(0))  # number of samples

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Load the entropies of the source images, and adapt the norms of the chosen blocks."""
        logits = setup.statistics_of("logits")["logits"]
        logits = logits if setup.classes is None else logits[:, setup.classes]
        self.source_entropies = constants([entropy(logits / self.temperature)], view)
        adapted = list(super().attach(view, setup))
        if self.reference and (last := final_norms(view)):
            adapted += parameters_of(last)
        self._norms = list(dict.fromkeys(adapted))
        return self._norms

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Bet on the entropies of the batch, and move them towards their targets in one update."""
        logits = self.predict(images, engine)
        everybody = engine.ranks.gather(logits)
        require_finite(everybody)
        targets = self.targets(entropy(everybody))
        if int(self.seen) < self.delay:
            return Step(logits)
        margin = reliable_margin(engine, all_classes=self.reference) if self.margin is None else self.margin

        def distance(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            h = entropy(logits / self.temperature)
            if not self.reweighted:
                return keep_all((h - target).square() / 2)
            weight = (margin - h.detach()).exp()
            return (weight * (h - target)).square() / 2, h.detach() < margin

        mine = targets[engine.ranks.positions(images)[0].to(targets.device)]
        result = engine.gradient(images, distance, extras=(mine,), selective=self.reweighted)
        self.update(engine, result.used)
        return Step(logits, result.used, result.loss if result.used else None)

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Return the logits, divided by the temperature."""
        return engine.predict(images) / self.temperature

    def targets(self, entropies: Tensor) -> Tensor:
        """Bet on entropies in their order, and return the target of each.

        The distribution function joins the points (entropy, share of entropies up to this one) of the distinct entropies of
        the source by lines. Outside of them it is constant.
        """
        quantiles, counts = np.unique(self.source_entropies[0].double().cpu().numpy(), return_counts=True)
        shares = counts.cumsum() / counts.sum()
        bent = self.bend(np.interp(entropies.double().cpu().numpy(), quantiles, shares).tolist())
        return torch.from_numpy(np.interp(bent, shares, quantiles)).to(entropies)

    def bend(self, places: Sequence[float]) -> list[float]:
        """Bet on values between 0 and 1 in their order, and return them as the bets bend them.

        The bet ascends the logarithm of the wealth by scale-free online gradient steps. The first sample of the stream does
        not change it.
        """
        bet, squares, log_wealth, seen = (b.item() for b in (self.bet, self.squares, self.log_wealth, self.seen))
        bent = []
        for u in places:
            bent.append(u + bet / 2 * (u * u - u))
            v = u - 0.5
            growth = max(1 + bet * v, LEAST_GROWTH)
            log_wealth = min(log_wealth + math.log(growth), MOST_WEALTH)
            outward = abs(bet) > self.bet_limit and bet * v > 0
            slope = 0.0 if outward or not seen else v / growth
            squares += slope * slope
            if slope:
                bet += self.gamma * slope / math.sqrt(squares)
            seen += 1
        for buffer, value in zip((self.bet, self.squares, self.log_wealth, self.seen), (bet, squares, log_wealth, seen)):
            buffer.fill_(value)
        return bent
