"""ReCAP: Beyond Entropy, Region Confidence Proxy for Wild Test-Time Adaptation (Hu et al., ICML 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.engine import Engine, keep_all
from ..core.method import Info, Setup, Step
from ..core.registry import register
from ..core.statistics import constants
from ..errors import ConfigError, require_between, require_whole
from ..models.view import ModelView
from ._recovery import Recovering
from .deyo import draw_orders, plpd_of

VARIANTS = ("plain", "plpd", "tent")
SCALE = 0.1  # unit of tau
NORM_SHARE = 0.0005  # share of the squared length of a class's row of the head in the shift of its logit
MOST = 600.0  # largest logarithm that is not clipped, whose exponential is finite in float64


@register("recap")
class ReCAP(Recovering):
    """Minimise the entropy of a region around each feature, and the instability of the predictions in it.

    The region is a Gaussian around the feature of a sample, with the variance of the source features times tau. Bounds of
    its mean entropy and of its mean divergence have a closed form. With p = softmax(z), a = A p, and A from the distances of
    the rows of the head in the metric of the region, regional entropy is sum q (log a - log p), where q is the softmax of
    the logits plus a small multiple of the squared lengths of the rows, and regional instability is sum p log a. Samples
    below a margin of regional entropy count, those with lower values more. A very low moving average of half the loss
    restores the source parameters.

        A_ij = exp(1/2 sum_k (tau / 0.1) v_k (W_ik - W_jk)^2),  where W is the head and v the variance of the source
        p = softmax(z),  a = A p,  q = softmax(z_c + 0.0005 |W_c|^2)
        RE = sum_c q_c (ln a_c - ln p_c),  RI = sum_c p_c ln a_c
        loss = mean over RE < margin of min(exp(weight_margin - RE), max_weight) (RE + instability RI)

    The variance is that of the features of clean source images, in the source statistics "class_tokens":
    `acclimate.adapt(model, "recap", source_statistics="stats.safetensors")`.

    Args:
        lr: Learning rate of the norms; by default 0.001 for a batch of 64, proportional to the batch size, and twice that
            for a batch of 1.
        variant: "plain", as described; "plpd", which also requires a high PLPD as in `DeYO`, with one more pass; or "tent",
            which learns from all samples with equal weights.
        margin: Regional entropy, in nats, below which a sample counts; by default ln C for C classes.
        weight_margin: Regional entropy at which the weight of a sample is 1; by default ln C.
        max_weight: Largest weight of a sample; by default 1.5, and 5 for a batch of 1.
        instability: Weight of the regional instability.
        tau: Size of the region: its variance is that of the source features times tau / 0.1.
        threshold: PLPD above which the method learns from a sample, in the variant "plpd".
        grid: For the PLPD the image is divided into grid x grid patches.
        momentum: Momentum of SGD.
        recovery: Value of the moving average of half the loss below which the source parameters are restored.
        decay: Decay of that moving average.
        blocks: Blocks that adapt: a number (the first blocks) or indices. By default all but the last quarter, of which at
            most three are left out (9 of 12, 21 of 24).
        batch_size: Batch size for the defaults of `lr` and `max_weight`. By default it is that of each batch, and with
            reference=True that of the first batch.
        reference: Behave as the authors' released code, quirks included: momentum moves the parameters when no sample
            counts, the moving average does not restart after a recovery, the margins count all classes of the head, and the
            selection by name leaves out blocks 9 to 11 of a 24-block model instead of the last three.

    Ours: the authors publish the variance as a file and do not say how it was estimated; here it is that of the source
    statistics. With a subset of the classes, A is that of their rows. The default margins, weights and learning rates are
    those that a later project uses for a ViT.
    """

    info = Info(
        paper="Hu et al., ICML 2025",
        adapts="norms of all but the last blocks",
        requires=("norms", "features", "blocks"),
        remembers="a moving average of the loss, and distances of the classes",
        needs=("class_tokens",),
        passes=(1, 1),
        replies_first=True,
        quick={"tau": 0.02},  # the rows of the tiny heads are so long that larger regions contain all classes
    )
    keeps_momentum = False
    watched_share = 0.5

    def __init__(
        self,
        *,
        lr: float | None = None,
        variant: str = "plain",
        margin: float | None = None,
        weight_margin: float | None = None,
        max_weight: float | None = None,
        instability: float = 0.5,
        tau: float = 1.2,
        threshold: float = 0.2,
        grid: int = 4,
        momentum: float = 0.9,
        recovery: float = 0.2,
        decay: float = 0.9,
        blocks: int | Sequence[int] | None = None,
        batch_size: int | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__(
            lr=lr,
            momentum=momentum,
            recovery=recovery,
            decay=decay,
            blocks=blocks,
            batch_size=batch_size,
            reference=reference,
        )
        if variant not in VARIANTS:
            raise ConfigError(f"variant={variant!r}: choose one of {', '.join(VARIANTS)}.")
        require_between(0, math.inf, optional=True, margin=margin, weight_margin=weight_margin, max_weight=max_weight)
        require_between(0, math.inf, instability=instability, tau=tau)
        require_between(-1, 1, threshold=threshold)
        require_whole(2, grid=grid)
        self.variant = variant
        self.margin = margin
        self.weight_margin = weight_margin
        self.max_weight = max_weight
        self.instability = instability
        self.tau = tau
        self.threshold = threshold
        self.grid = grid
        if variant == "plpd":
            self.info = replace(self.info, passes=(2, 1))

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Compute the distances of the classes in the metric of the region, and adapt the norms of the chosen blocks."""
        rows = view.head_weight().double()
        rows = rows if setup.classes is None else rows[setup.classes]
        spread = setup.statistics_of("class_tokens")["std"][-rows.shape[1] :].to(rows)
        scaled = rows * spread * math.sqrt(self.tau / SCALE)
        log_a = torch.cdist(scaled, scaled, compute_mode="donot_use_mm_for_euclid_dist").square() / 2
        shift = NORM_SHARE * rows.square().sum(1)
        self.region = constants((log_a.to(view.precise), shift.to(view.precise)), view)
        return super().attach(view, setup)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Minimise regional entropy and instability of the samples that count in one update."""
        log_c = math.log(engine.view.classes if self.reference else engine.num_classes)
        margin = log_c if self.margin is None else self.margin
        weight_margin = log_c if self.weight_margin is None else self.weight_margin
        single = (self.batch_size or int(engine.batch_size)) == 1
        max_weight = (5.0 if single else 1.5) if self.max_weight is None else self.max_weight
        a = self.region[0].double().clamp(max=MOST).exp()

        def objective(logits: Tensor, *shuffling: Tensor) -> tuple[Tensor, Tensor]:
            regional_entropy, instability = self.regional(logits, a)
            losses, h = regional_entropy + self.instability * instability, regional_entropy.detach()
            if self.variant == "tent":
                return keep_all(losses)
            kept = h < margin
            if self.variant == "plpd":
                some, orders = shuffling
                kept = plpd_of(some, logits.detach(), kept, orders, self.grid, engine) > self.threshold
            return (weight_margin - h).exp().clamp(max=max_weight) * losses, kept

        extras = (images, self.orders(images, engine)) if self.variant == "plpd" else ()
        result = engine.gradient(images, objective, extras=extras, selective=self.variant != "tent")
        return self.learn(result.logits, result.used, result.loss, engine)

    def regional(self, logits: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return regional entropy and regional instability of each sample.

        `a` is the matrix A in float64. Its entries are 1 or more, so that no logarithm is below 0, and they may be large.
        """
        log_p = logits.double().log_softmax(-1)
        p, q = log_p.exp(), (logits.double() + self.region[1]).softmax(-1)
        log_ap = (p @ a).log()
        return (q * (log_ap - log_p)).sum(-1).to(logits), (p * log_ap).sum(-1).to(logits)

    def orders(self, images: Tensor, engine: Engine) -> Tensor:
        """Draw an order of the patches for each image, (batch, grid * grid)."""
        return draw_orders(images, self.grid, engine)
