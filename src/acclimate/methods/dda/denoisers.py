"""Denoisers by name: a file with weights, the bundled one, or a formula."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from ...data import bundled
from ...errors import ConfigError
from . import unet
from .process import Denoiser, Schedule

HOW = (
    'a file with weights (OpenAI\'s "256x256_diffusion_uncond.pt", or *.safetensors as methods.dda.unet writes it), '
    '"bundled" for images like the bundled ones, or "gaussian", a formula for tests'
)


def open_denoiser(name: str | os.PathLike[str] | None) -> Denoiser:
    """Return the denoiser of this name, with parameters that need no gradient."""
    if name is None:
        raise ConfigError(f"DDA needs a diffusion model: give denoiser=, {HOW}.")
    if name == "gaussian":
        return Gaussian()
    return unet.read(bundled.DENOISER if name == "bundled" else name).requires_grad_(False)


class Gaussian(nn.Module):
    """The optimal denoiser for images whose pixels are independent and normally distributed.

    It is not a model of real images: it moves every pixel towards the mean. But all of its properties are known in closed
    form.

    Args:
        mean: Mean of the pixels, which are from -1 to 1.
        std: Standard deviation of the pixels.
    """

    size = channels = None  # it takes images of any size and number of channels

    def __init__(self, mean: float = 0.0, std: float = 0.5) -> None:
        super().__init__()
        self.mean, self.std = mean, std
        self.kept = torch.tensor(Schedule().kept)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        """Return the expected noise in the images."""
        kept = self.kept.to(x)[steps][:, None, None, None]
        return (1 - kept).sqrt() * (x - kept.sqrt() * self.mean) / (kept * self.std**2 + 1 - kept)
