"""SPA: Self-Bootstrapping for Versatile Test-Time Adaptation (Niu et al., ICML 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.engine import Engine, require_finite
from ..core.method import Info, Setup, Step
from ..core.registry import register
from ..errors import require_between
from ..models.view import ModelView
from ._siamese import Siamese, divergence


@register("spa")
class SPA(Siamese):
    """Learn to predict from deteriorated views of an image what is predicted for the image itself.

    One view lacks some of the low frequencies of the image. The other view is mixed with Gaussian noise, with a proportion
    for each patch that is learned so that the task becomes hard. The views pass through a linear predictor before the head;
    the image itself does not. The prediction of the image is the target wherever it is more confident than that of the view.
    The loss is the divergence from target to view, averaged over these samples for each view, and summed over the views.

        p: prediction of the image;  q_v: prediction of its view v
        loss = sum over v of the mean of KL(p || q_v) over the samples with max p > max q_v
        noisy view = (1 - a) image + a noise,  where a ascends the loss, and its mean is `noise`

    In addition to the batch, the method needs the normalisation of the model, to know the range of pixels, and two more
    passes.

    Args:
        lr: Learning rate of the norms. The authors give no value for batch sizes other than 64, so it does not depend on the
            batch size.
        lr_predictor: Learning rate of the predictor.
        noise: Mean proportion of noise over the patches.
        dropped_frequencies: Share of the low frequencies that are removed.
        low_frequencies: Side of the square of low frequencies, as a share of the side of the spectrum.
        lr_noise: Learning rate of the proportions of noise, which ascend the loss.
        momentum: Momentum of SGD.
        momentum_noise: Momentum of SGD for the proportions of noise.
        reference: Behave as the authors' released code: the noisy view is clipped to [-1, 1], whatever the normalisation of
            the model is (by default it is clipped to the range of pixels), and momentum moves norms, predictor and noise
            when neither view has a sample to learn from (by default no step is taken then).

    Ours: the noise has one proportion for each of the model's own patches (16 pixels in ViT-B/16, as the authors have).
    """

    info = Info(
        paper="Niu et al., ICML 2025",
        adapts="all norms, a predictor before the head, and noise",
        requires=("norms", "features", "blocks"),
        augments=True,
        passes=(3, 2),
        replies_first=True,
    )

    def __init__(
        self,
        *,
        lr: float = 0.01,
        lr_predictor: float = 0.05,
        noise: float = 0.4,
        dropped_frequencies: float = 0.2,
        low_frequencies: float = 0.2,
        lr_noise: float = 1.0,
        momentum: float = 0.9,
        momentum_noise: float = 0.9,
        reference: bool = False,
    ) -> None:
        super().__init__(lr=lr, lr_predictor=lr_predictor, momentum=momentum, reference=reference)
        require_between(0, math.inf, lr=lr, lr_predictor=lr_predictor, lr_noise=lr_noise)
        require_between(
            0,
            1,
            noise=noise,
            dropped_frequencies=dropped_frequencies,
            low_frequencies=low_frequencies,
            momentum_noise=momentum_noise,
        )
        self.noise = noise
        self.dropped_frequencies = dropped_frequencies
        self.low_frequencies = low_frequencies
        self.lr_noise = lr_noise
        self.momentum_noise = momentum_noise

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Adapt all norms, the predictor and the proportions of noise."""
        side = math.isqrt(view.tokens - 1)
        # the square of alpha is the proportion of noise
        alpha = torch.full((side, side), math.sqrt(self.noise), dtype=view.dtype, device=view.device)
        self.alpha = nn.Parameter(alpha)
        return [*super().attach(view, setup), self.alpha]

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer:
        """Return SGD that descends the loss over norms and predictor, and ascends it over the proportions of noise."""
        ascent = {"params": [self.alpha], "lr": self.lr_noise, "momentum": self.momentum_noise, "maximize": True}
        return torch.optim.SGD([*self.groups(0.01, 0.05), ascent], momentum=self.momentum)

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Learn from both views of each image in one update."""
        noise, keep = self.draw(images, engine)
        target = engine.predict(images)
        require_finite(target)

        def predicted(view: Tensor, *_: Tensor) -> tuple[Tensor]:
            return (self.predicted(engine.forward_features(view)[1], engine),)

        def noisy(images: Tensor, *_: Tensor) -> tuple[Tensor]:
            return predicted(self.clip(mix(images, noise, self.alpha), engine))

        blurred = engine.gradient(drop(images, keep), surer, extras=(target,), forward=predicted, selective=True)
        gradient = [p.grad for p in engine.adapted.tensors if p.grad is not None]
        mixed = engine.gradient(images, surer, extras=(target,), forward=noisy, selective=True)
        used = int(engine.ranks.gather(blurred.kept | mixed.kept).sum())
        if not used and not self.reference:
            return Step(target)
        if not mixed.used:
            engine.adapted.zero_gradient()  # a view without samples adds no gradient; momentum still moves the parameters
        engine.adapted.amend_gradient(plus=gradient or None)
        engine.adapted.update()
        with torch.no_grad():
            length = self.alpha.square().mean().clamp_min(torch.finfo(self.alpha.dtype).tiny)
            self.alpha.mul_((self.noise / length).sqrt()).clamp_(-1, 1)
        losses = [result.loss for result in (blurred, mixed) if result.used]
        return Step(target, used, sum(losses) if losses else None)

    def draw(self, images: Tensor, engine: Engine) -> tuple[Tensor, Tensor]:
        """Draw noise, the same for all images, and the low frequencies that each image and channel keeps."""
        positions, count = engine.ranks.positions(images)
        channels, *size = images.shape[1:]
        top, left = low_frequencies(size, self.low_frequencies)
        noise = torch.randn(channels, *size, generator=engine.rng)
        keep = torch.rand(count, channels, 2 * top, 2 * left, generator=engine.rng) >= self.dropped_frequencies
        return noise.to(images), keep[positions.cpu()].to(images.device)

    def clip(self, images: Tensor, engine: Engine) -> Tensor:
        """Clip images to the range of pixels, or with `reference` to [-1, 1]."""
        if self.reference:
            return images.clamp(-1, 1)
        return engine.from_pixels(engine.to_pixels(images).clamp(0, 1))


def surer(view: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divergence from target to view, and whether the target is more confident than the view."""
    return divergence(target, view), target.softmax(-1).amax(-1) > view.detach().softmax(-1).amax(-1)


def mix(images: Tensor, noise: Tensor, alpha: Tensor) -> Tensor:
    """Mix each patch of the images with its own proportion of noise."""
    share = F.interpolate(alpha.square()[None, None], images.shape[-2:], mode="nearest")
    return (1 - share) * images + share * noise


def low_frequencies(size: Sequence[int], share: float) -> tuple[int, int]:
    """Return the number of rows and columns of low frequencies on either side of zero."""
    height, width = size
    return int(height * share / 2), int(width * share / 2)


def drop(images: Tensor, keep: Tensor) -> Tensor:
    """Remove the low frequencies from images where `keep` is False.

    `keep` has the shape (batch, channels, rows, columns), with frequency zero in its centre. The spectrum of a real image at
    opposite frequencies is conjugate. Therefore the flags of the rows above zero, and to the right of zero in row zero, hold
    also for the opposite frequencies, and the other flags have no effect.
    """
    if not len(images):  # torch 2.4 transforms no empty batch
        return images
    spectrum = torch.fft.fft2(images.to(torch.promote_types(images.dtype, torch.float32)))
    top, left = keep.shape[-2] // 2, keep.shape[-1] // 2
    rows, columns, right = (torch.arange(a, b) for a, b in ((-top, 0), (-left, left), (0, left)))
    kept = torch.ones_like(spectrum, dtype=torch.bool)
    for sign in (1, -1):
        kept[..., sign * rows[:, None], sign * columns] = keep[..., :top, :]
        if top:
            kept[..., 0, sign * right] = keep[..., top, left:]
    return torch.fft.ifft2(spectrum * kept).real.to(images.dtype)
