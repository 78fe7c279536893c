"""The diffusion process: noise is added to an image step by step, and removed again with the help of a denoiser.

Images are from -1 to 1, (batch, channels, height, width). The equations are those of Ho et al. (NeurIPS 2020), the variance
between two bounds is that of Nichol and Dhariwal (ICML 2021), and the guidance is that of Gao et al. (CVPR 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ConfigError, require_whole

STEPS, FIRST_BETA, LAST_BETA = 1000, 1e-4, 0.02  # the process that denoisers are trained for


class Denoiser(Protocol):
    """A network that predicts the noise in images, such as an `nn.Module` with these two attributes.

    It takes noisy images and their steps, integers from 0 to 999, (batch,), in the linear schedule of 1000 steps. It returns
    the noise, or twice the number of channels. In the latter case the second half gives, from -1 to 1, the position of the
    logarithm of the variance between its two bounds. It has to process each image on its own.
    """

    @property
    def size(self) -> int | None:
        """The side of the square images that it takes; None for any."""

    @property
    def channels(self) -> int | None:
        """The number of channels of the images; None for any."""

    def __call__(self, x: Tensor, steps: Tensor, /) -> Tensor:
        """Return the noise in the images, or the noise and the position of the variance between its bounds."""


Denoise = Callable[[Tensor, Tensor], Tensor]
"""The call of a denoiser: from noisy images and their steps to the noise."""


class Schedule:
    """A subset of the steps of the linear schedule, evenly spaced, as a process of its own.

    Args:
        count: The number of steps, of the 1000.
    """

    def __init__(self, count: int = STEPS) -> None:
        require_whole(1, steps=count)
        if count > STEPS:
            raise ConfigError(f"steps={count}: the schedule has {STEPS}, give at most so many.")
        stride = (STEPS - 1) / (count - 1) if count > 1 else 0.0
        self.steps = [round(i * stride) for i in range(count)]  # numbers of the steps for the denoiser
        every = (1 - torch.linspace(FIRST_BETA, LAST_BETA, STEPS, dtype=torch.float64)).cumprod(0)
        kept = every[self.steps]
        before = torch.cat([kept.new_ones(1), kept[:-1]])
        betas = 1 - kept / before
        self.kept: list[float] = kept.tolist()  # share of the variance of the image that is left after step i
        self._before: list[float] = before.tolist()
        self.betas: list[float] = betas.tolist()
        # The variances of the steps back, given the image.
        self.variances: list[float] = ((1 - before) / (1 - kept) * betas).tolist()

    def __len__(self) -> int:
        return len(self.steps)

    def noised(self, image: Tensor, i: int, noise: Tensor) -> Tensor:
        """Return the noisy image after step i: sqrt(kept) image + sqrt(1 - kept) noise."""
        return math.sqrt(self.kept[i]) * image + math.sqrt(1 - self.kept[i]) * noise

    def image(self, x: Tensor, i: int, noise: Tensor) -> Tensor:
        """Return the image, given the noisy image after step i and its noise; this is the inverse of `noised`."""
        return (x - math.sqrt(1 - self.kept[i]) * noise) / math.sqrt(self.kept[i])

    def mean_before(self, x: Tensor, i: int, image: Tensor) -> Tensor:
        """Return the mean of the sample before step i, given the sample after it and the image."""
        kept, before, beta = self.kept[i], self._before[i], self.betas[i]
        return (math.sqrt(before) * beta * image + math.sqrt(1 - beta) * (1 - before) * x) / (1 - kept)

    def deviation(self, i: int, fraction: Tensor | None) -> Tensor | float:
        """Return the standard deviation of the sample before step i.

        A learned one is given by `fraction`: its position between two bounds, from -1 to 1.
        """
        if i == 0:
            return 0.0  # the last step gives the image
        if fraction is None:
            return math.sqrt(self.variances[i])
        low, high = math.log(self.variances[i]), math.log(self.betas[i])
        return torch.exp(0.5 * (low + (fraction + 1) / 2 * (high - low)))


def low_pass(images: Tensor, factor: int) -> Tensor:
    """Reduce images by a factor in both directions, and enlarge them again, by bicubic interpolation."""
    size = images.shape[-2:]
    small = [math.ceil(side / factor) for side in size]
    return resized(resized(images, small), size)


def resized(images: Tensor, size: Sequence[int]) -> Tensor:
    """Resize images by bicubic interpolation, with antialiasing when they become smaller."""
    if tuple(images.shape[-2:]) == tuple(size):
        return images
    return F.interpolate(images, list(size), mode="bicubic", antialias=True)


class _Moved(NamedTuple):
    """The result of a step back."""

    sample: Tensor  # sample before the step
    gradient: Tensor  # gradient of half the squared distance between the low-pass images
    square: Tensor  # the squared distance, (batch, 1)


def step_back(
    denoiser: Denoise, schedule: Schedule, x: Tensor, i: int, noise: Tensor, towards: Tensor, factor: int
) -> _Moved:
    """Sample the images before step i, and compute the gradient of their distance from low-pass images.

    Args:
        denoiser: The denoiser, which predicts the noise.
        schedule: The process.
        x: Images after step i.
        i: The step.
        noise: Standard normal noise.
        towards: The low-pass images towards which the guidance moves.
        factor: The factor of the low-pass filter.
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
    """Apply the work to the whole batch."""
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
    """Generate the images of DDA: add noise to images, and remove it again with guidance by their low frequencies.

    After every step back the sample moves against the gradient of a distance: that between the low-pass versions of the
    denoised image and of the given image.

    Args:
        denoiser: The denoiser, which predicts the noise.
        images: Images from -1 to 1, of the size that the denoiser takes.
        seeds: Seeds of the noise, one for each image, so that it does not depend on the other images.
        steps: Number of steps, evenly spaced in the 1000.
        start: Number of steps of noise.
        factor: Factor of the low-pass filter.
        scale: Strength of the guidance.
        reference: Behave as the authors' code: the distance is that of the whole batch, so that the guidance of an image is
            weaker in a larger batch; and noise is added one time more than it is removed.
        each: A function that applies work to parts of the batch, and concatenates its results.
        gather: A function from the rows of the images of this process to those of the whole batch.
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
        # The gradient of a length is that of half its square, divided by the length. So the length over a whole batch
        # needs only one number from each image.
        x, gradient, square = each(work, batch) if len(x) else (x, x, x.new_zeros(0, 1))
        if reference:
            square = gather(square).sum()[None, None]
        x = x - scale * (gradient / square.clamp_min(torch.finfo(x.dtype).tiny).sqrt()[..., None, None])
    return x
