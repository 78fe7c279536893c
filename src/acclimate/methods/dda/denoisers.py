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
    """The denoiser of that name, without gradients of its own."""
    if name is None:
        raise ConfigError(f"DDA needs a diffusion model: give denoiser=, {HOW}.")
    if name == "gaussian":
        return Gaussian()
    return unet.read(bundled.DENOISER if name == "bundled" else name).requires_grad_(False)


class Gaussian(nn.Module):
    """The best possible denoiser for images whose pixels are independent and normally distributed.

    That is no model of real images: it pulls every pixel towards a grey. But all about it is known in closed form.

    Args:
        mean: Of the pixels, which are from -1 to 1.
        std: Of the pixels.
    """

    size = channels = None  # it takes any

    def __init__(self, mean: float = 0.0, std: float = 0.5) -> None:
        super().__init__()
        self.mean, self.std = mean, std
        self.kept = torch.tensor(Schedule().kept)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        kept = self.kept.to(x)[steps][:, None, None, None]
        return (1 - kept).sqrt() * (x - kept.sqrt() * self.mean) / (kept * self.std**2 + 1 - kept)
