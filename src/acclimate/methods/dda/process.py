"""The diffusion process: noise is added to an image step by step, and taken away again with the help of a denoiser.

Images are from -1 to 1, (batch, channels, height, width). Equations are those of Ho et al. (NeurIPS 2020), the variance
between two bounds that of Nichol and Dhariwal (ICML 2021), guidance that of Gao et al. (CVPR 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ConfigError, require_whole

STEPS, FIRST_BETA, LAST_BETA = 1000, 1e-4, 0.02  # of the process that denoisers are trained for


class Denoiser(Protocol):
    """What predicts the noise in images, such as an `nn.Module` with these two attributes.

    It gets noisy images and their steps, whole numbers from 0 to 999, (batch,), in the linear schedule of 1000 steps. It
    returns the noise; or twice the channels, of which the second half says, from -1 to 1, where the logarithm of the
    variance lies between its two bounds. It has to treat each image on its own.
    """

    @property
    def size(self) -> int | None:
        """Side of the square images that it takes; None for any."""

    @property
    def channels(self) -> int | None:
        """Of the images; None for any."""

    def __call__(self, x: Tensor, steps: Tensor, /) -> Tensor: ...


Denoise = Callable[[Tensor, Tensor], Tensor]
"""A denoiser's call alone."""


class Schedule:
    """Some of the steps of the linear schedule, evenly spaced, as a process of its own.

    Args:
        count: How many of the 1000.
    """

    def __init__(self, count: int = STEPS) -> None:
        require_whole(1, steps=count)
        if count > STEPS:
            raise ConfigError(f"steps={count}: the schedule has {STEPS}, give at most so many.")
        stride = (STEPS - 1) / (count - 1) if count > 1 else 0.0
        self.steps = [round(i * stride) for i in range(count)]  # what the denoiser is told
        every = (1 - torch.linspace(FIRST_BETA, LAST_BETA, STEPS, dtype=torch.float64)).cumprod(0)
        kept = every[self.steps]
        before = torch.cat([kept.new_ones(1), kept[:-1]])
        betas = 1 - kept / before
        self.kept: list[float] = kept.tolist()  # the share of the image's variance that is left after step i
        self._before: list[float] = before.tolist()
        self.betas: list[float] = betas.tolist()
        self.variances: list[float] = ((1 - before) / (1 - kept) * betas).tolist()  # of the step back, given the image

    def __len__(self) -> int:
        return len(self.steps)

    def noised(self, image: Tensor, i: int, noise: Tensor) -> Tensor:
        """The image after step i."""
        return math.sqrt(self.kept[i]) * image + math.sqrt(1 - self.kept[i]) * noise

    def image(self, x: Tensor, i: int, noise: Tensor) -> Tensor:
        """The inverse."""
        return (x - math.sqrt(1 - self.kept[i]) * noise) / math.sqrt(self.kept[i])

    def mean_before(self, x: Tensor, i: int, image: Tensor) -> Tensor:
        """Mean of what was before step i, given what is after it, and the image."""
        kept, before, beta = self.kept[i], self._before[i], self.betas[i]
        return (math.sqrt(before) * beta * image + math.sqrt(1 - beta) * (1 - before) * x) / (1 - kept)

    def deviation(self, i: int, fraction: Tensor | None) -> Tensor | float:
        """Standard deviation of the same; a learned one is that `fraction`, from -1 to 1, between two bounds."""
        if i == 0:
            return 0.0  # what the last step gives is the image
        if fraction is None:
            return math.sqrt(self.variances[i])
        low, high = math.log(self.variances[i]), math.log(self.betas[i])
        return torch.exp(0.5 * (low + (fraction + 1) / 2 * (high - low)))


def low_pass(images: Tensor, factor: int) -> Tensor:
    """Bicubic to so many times less in both directions, and back."""
    size = images.shape[-2:]
    small = [math.ceil(side / factor) for side in size]
    return resized(resized(images, small), size)


def resized(images: Tensor, size: Sequence[int]) -> Tensor:
    """Bicubic, filtered where it becomes smaller."""
    if tuple(images.shape[-2:]) == tuple(size):
        return images
    return F.interpolate(images, list(size), mode="bicubic", antialias=True)


class _Moved(NamedTuple):
    sample: Tensor  # what was before the step
    gradient: Tensor  # of half the squared distance between the low-pass images
    square: Tensor  # that squared distance, (batch, 1)


def step_back(
    denoiser: Denoise, schedule: Schedule, x: Tensor, i: int, noise: Tensor, towards: Tensor, factor: int
) -> _Moved:
    """Sample what was before step i, and find which way the image in x becomes more like another one.

    Args:
        denoiser: Predicts the noise.
        schedule: The process.
        x: Images after step i.
        i: The step.
        noise: Standard normal.
        towards: Low-pass images.
        factor: Of the low-pass filter.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = denoiser(x, torch.full((len(x),), schedule.steps[i], device=x.device)).to(x.dtype)
        channels = x.shape[1]
        if out.shape[1] not in (channels, 2 * channels) or out.shape[2:] != x.shape[2:]:
            raise ConfigError(
                f"The denoiser made {tuple(out.shape)} of {tuple(x.shape)}: give noise, or noise and variance."
            )
        fraction = out[:, channels:].detach() if out.shape[1] > channels else None
        image = schedule.image(x, i, out[:, :channels]).clamp(-1, 1)
        distance = (low_pass(image, factor) - towards).flatten(1).square().sum(1, keepdim=True)
        (gradient,) = torch.autograd.grad(distance.sum() / 2, x)
    with torch.no_grad():
        sample = schedule.mean_before(x, i, image) + schedule.deviation(i, fraction) * noise
    return _Moved(sample, gradient, distance.detach())


Each = Callable[[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]], tuple[Tensor, ...]]


def at_once(work: Callable[..., tuple[Tensor, ...]], batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return work(*batch)


@torch.no_grad()
def regenerated(
    denoiser: Denoise,
    images: Tensor,
    seeds: Sequence[int],
    *,
    steps: int = 100,
    start: int = 50,
    factor: int = 4,
    scale: float = 6.0,
    reference: bool = False,
    each: Each = at_once,
    gather: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    """DDA's images: noise is added to the given ones and taken away again, towards their low frequencies.

    After every step back the sample moves against the gradient of the distance between the low-pass image that the
    denoiser sees in the noise and the given one.

    Args:
        denoiser: Predicts the noise.
        images: From -1 to 1, of the size that the denoiser takes.
        seeds: Of the noise, one for each image: it does not depend on the others.
        steps: Of the 1000, evenly spaced.
        start: Steps of noise.
        factor: Of the low-pass filter.
        scale: Of the guidance.
        reference: As the authors' code: the distance is that of the whole batch, so that the guidance of an image becomes
            weaker the more there are; and noise is added once more often than it is taken away.
        each: Applies work to parts of the batch, and puts its results together.
        gather: From the rows of this process's images to those of the whole batch.
    """
    schedule = Schedule(steps)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def noise() -> Tensor:
        drawn = [torch.randn(images.shape[1:], generator=generator) for generator in generators]
        return torch.stack(drawn).to(images) if drawn else torch.zeros_like(images)

    towards = low_pass(images, factor) if len(images) else images
    x = schedule.noised(images, start if reference else start - 1, noise())
    for i in reversed(range(start)):

        def work(*part: Tensor, i: int = i) -> tuple[Tensor, ...]:
            return step_back(denoiser, schedule, part[0], i, part[1], part[2], factor)

        batch = (x, noise(), towards)
        # the gradient of a length is that of half its square, divided by it: a batch's length needs only one number of all
        x, gradient, square = each(work, batch) if len(x) else (x, x, x.new_zeros(0, 1))
        if reference:
            square = gather(square).sum()[None, None]
        x = x - scale * (gradient / square.clamp_min(torch.finfo(x.dtype).tiny).sqrt()[..., None, None])
    return x
