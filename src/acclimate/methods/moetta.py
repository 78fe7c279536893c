"""MoETTA: Test-Time Adaptation under Mixed Distribution Shifts with MoE-LayerNorm (Fan et al., AAAI 2026)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.engine import Engine, entropy, keep_all, require_finite
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..errors import require_between, require_whole
from ..models.surgery import capture
from ..models.view import ModelView, require_supported
from ._losses import reliable_margin

IMAGENET = 1000  # classes that the released code assumes


class Experts(nn.Module):
    """The experts of one norm, each an offset of its scale and shift, and the router that chooses one for each sample.

    Args:
        count: Number of experts.
        width: Width of the norm.
        rng: The generator of the initial values of the router. The experts start at zero.
    """

    def __init__(self, count: int, width: int, rng: torch.Generator) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(count, width))
        self.shift = nn.Parameter(torch.zeros(count, width))
        self.router = nn.Linear(width, count)
        nn.init.xavier_normal_(self.router.weight, generator=rng)
        nn.init.zeros_(self.router.bias)

    def routes(self, x: Tensor) -> Tensor:
        """Return the probabilities of the experts, (batch, experts), from the mean token of the input of the norm."""
        between = tuple(range(1, x.ndim - 1))
        return self.router(x.mean(between) if between else x).softmax(-1)

    def offsets(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the offsets of the most probable expert of each sample.

        They are multiplied by the probability of the expert divided by itself as a constant. The factor is 1, and passes a
        gradient to the router.
        """
        probability, expert = self.routes(x).max(-1)
        factor = (probability / probability.detach()).to(self.scale.dtype)[:, None]
        shape = (len(x), *(1 for _ in x.shape[1:-1]), -1)
        return (factor * self.scale[expert]).view(shape), (factor * self.shift[expert]).view(shape)


@register("moetta")
class MoETTA(Method):
    """Learn several offsets of every norm, and routers that choose one of them for each sample, by entropy minimisation.

    The norms themselves stay as they are, and the offsets, which are called experts, start at zero. The method learns from
    samples whose entropy is at most a threshold, the mean entropy of the batches so far. Lower entropies have more weight. A
    second term balances the use of the experts: for each norm, the number of experts times the sum over experts of their
    mean probability times the share of the samples that they are chosen for. Its weight is proportional to the threshold.

        norm(x) + n(x) scale_e + shift_e,  where n(x) is x normalised, and e = argmax r(x) for the router r
        t = mean of H(z) over all batches so far;  S = the samples with H(z) <= t
        u_e: share of the batch for which e is chosen;  r_e: mean of r(x)_e over the batch
        loss = mean of exp(margin - H(z)) H(z) over S + balance t experts (sum of u_e r_e over norms and e)

    In addition to the batch, the method needs a second forward pass, because the threshold and these shares are those of the
    whole batch.

    Args:
        lr: Learning rate of experts and routers. That of the authors does not depend on the batch size.
        experts: Number of experts of each norm.
        balance: Weight of the balance of the experts, as a share of the threshold.
        margin: Entropy, in nats, at which the weight of a sample is 1; by default 0.4 ln C for C classes.
        plain_norms: Number of norms, from the first one on, without experts: by default 1, and 15 for 24 blocks and more, as
            in the authors' configurations of ViT-B and ViT-L.
        momentum: Momentum of SGD.
        reference: Behave as the authors' released code: the threshold is not the mean entropy of the batches, because the
            first one of the list that is averaged shares its memory with the threshold, and the default margin is that of
            1000 classes.
    """

    info = Info(
        paper="Fan et al., AAAI 2026",
        adapts="experts of the norms, and their routers",
        requires=("norms", "blocks"),
        remembers="the mean entropy",
        passes=(2, 1),
        replies_first=True,
    )

    def __init__(
        self,
        *,
        lr: float = 0.001,
        experts: int = 9,
        balance: float = 0.2,
        margin: float | None = None,
        plain_norms: int | None = None,
        momentum: float = 0.9,
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_between(0, math.inf, lr=lr, balance=balance)
        require_between(0, math.inf, optional=True, margin=margin)
        require_between(0, 1, momentum=momentum)
        require_whole(1, experts=experts)
        require_whole(0, optional=True, plain_norms=plain_norms)
        self.lr = lr
        self.experts = experts
        self.balance = balance
        self.margin = margin
        self.plain_norms = plain_norms
        self.momentum = momentum
        self.reference = reference
        self.threshold: Tensor
        self.total: Tensor
        self.count: Tensor
        self.register_buffer("threshold", torch.tensor(math.nan, dtype=torch.float64))  # NaN before the first batch
        self.register_buffer("total", torch.tensor(0.0, dtype=torch.float64))  # sum of the mean entropies of the batches
        self.register_buffer("count", torch.tensor(0))  # number of batches

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Give the norms experts, and adapt the experts and their routers."""
        norms = [norm for norm in view.norms if isinstance(norm, nn.LayerNorm) and norm.normalized_shape == (view.width,)]
        plain = (15 if len(view.blocks) >= 24 else 1) if self.plain_norms is None else self.plain_norms
        require_supported(
            view.model, len(norms) > plain, f"it has {len(norms)} LayerNorms, and {plain} stay without experts"
        )
        layers = [Experts(self.experts, view.width, setup.rng).to(view.device, view.dtype) for _ in norms[plain:]]
        self._layers, self.layers = layers, nn.ModuleList(layers)
        self._norms = [view.offset_norm(norm, layer.offsets) for norm, layer in zip(norms[plain:], layers)]
        return list(self.layers.parameters())

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD over experts and routers."""
        return torch.optim.SGD(self.layers.parameters(), lr=self.lr, momentum=self.momentum)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Minimise the entropy of the samples below the threshold, and balance the experts, in one update."""
        logits, routes = engine.evaluate(images, lambda part: self.routed(part, engine))
        require_finite(logits)
        entropies = engine.ranks.gather(entropy(logits))
        shares = F.one_hot(engine.ranks.gather(routes.argmax(-1)), self.experts).to(routes).mean(0)  # (layers, experts)
        threshold, total = self.follow(float(entropies.double().mean()))
        used = int((entropies <= threshold).sum())
        margin = self.margin
        if margin is None:
            margin = 0.4 * math.log(IMAGENET) if self.reference else reliable_margin(engine)

        def objective(logits: Tensor, routes: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
            h = entropy(logits)
            weight = kept * (margin - h.detach()).exp() * len(entropies) / max(used, 1)  # for the mean over kept samples
            unbalance = self.experts * (shares * routes).sum((1, 2))
            return keep_all(weight * h + self.balance * threshold * unbalance)

        kept = (entropy(logits) <= threshold).to(logits)
        result = engine.gradient(images, objective, extras=(kept,), forward=lambda part, _: self.routed(part, engine))
        engine.adapted.update()
        self.threshold.fill_(threshold)
        self.total.fill_(total)
        self.count += 1
        return Step(logits, used, result.loss)

    def routed(self, images: Tensor, engine: Engine) -> tuple[Tensor, Tensor]:
        """Return the logits, and the probabilities of all experts, (batch, layers, experts)."""

        def passed(images: Tensor) -> tuple[Tensor, Tensor]:
            with capture(self._norms) as seen:
                logits = engine.view.logits(images)
            return torch.stack(
                [layer.routes(seen[norm].inputs) for norm, layer in zip(self._norms, self._layers)], dim=1
            ), logits

        return engine.forward_with(passed, images)

    def follow(self, mean: float) -> tuple[float, float]:
        """Return the threshold and the sum of the mean entropies of the batches, including a batch with this mean.

        The released code multiplies the threshold by the relative change of the average. That would give the average, but
        the first term of the sum is changed with the threshold.
        """
        before, total, count = float(self.threshold), float(self.total), int(self.count)
        after = (total + mean) / (count + 1)
        if not self.reference or not total:
            return after, total + mean
        threshold = before * after / (total / count)
        return threshold, total + mean + threshold - before
