"""The U-Net of ADM (Dhariwal and Nichol, NeurIPS 2021), which predicts the noise in an image, and files of its weights.

It has residual blocks whose second norm is scaled and shifted depending on the step, residual blocks that halve or double
the resolution, and attention over the coarse maps. The parameters have the names of the weights that the authors of the
paper published, so that `256x256_diffusion_uncond.pt` should be readable as it is. The code was written from knowledge of
the network, and was never tried with the real file: the tests compare names and shapes with that knowledge, not with the
file. If a name or shape differs, reading fails with an error that names it. Parts without parameters (the order of heads,
the embedding of a step) could differ without an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ...core.files import require_regular, write_whole
from ...errors import ConfigError, StateError, first_line, require_whole

ARCHITECTURE = "architecture"  # the key in the header of a safetensors file


@dataclass(frozen=True)
class Architecture:
    """The sizes of a U-Net; the defaults are those of `256x256_diffusion_uncond.pt`."""

    size: int = 256  # side of the square images
    channels: int = 3
    width: int = 256  # channels of the finest maps
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4, 4)  # multiples of the width, one for each resolution
    blocks: int = 2  # residual blocks per resolution, and one more on the way up
    attention: tuple[int, ...] = (32, 16, 8)  # sides of the maps that have attention
    head_width: int = 64
    groups: int = 32  # groups of a norm
    learned_variance: bool = True

    def __post_init__(self) -> None:
        for name in ("multipliers", "attention"):  # JSON has lists instead of tuples
            object.__setattr__(self, name, tuple(getattr(self, name)))
        whole = ("size", "channels", "width", "blocks", "head_width", "groups")
        require_whole(1, **{name: getattr(self, name) for name in whole})
        halvings = 2 ** (len(self.multipliers) - 1)
        if not self.multipliers or self.size % halvings:
            raise ConfigError(f"size={self.size}: give a multiple of {halvings} for {len(self.multipliers)} resolutions.")
        for multiplier in self.multipliers:
            require_whole(1, multipliers=multiplier)
            if self.width * multiplier % math.lcm(self.groups, self.head_width if self.attention else 1):
                raise ConfigError(
                    f"width={self.width}: times {multiplier} it has to be a multiple of groups={self.groups}, and of "
                    f"head_width={self.head_width} if there is attention."
                )


class UNet(nn.Module):
    """A network from noisy images, (batch, channels, size, size), and their steps, (batch,), to the noise in the images.

    Pixels are from -1 to 1. With `learned_variance` there are twice the channels. The second half gives, from -1 to 1, the
    position of the variance of a step between its two bounds.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = a = architecture
        self.size, self.channels = a.size, a.channels
        embedded = 4 * a.width
        self.time_embed = nn.Sequential(nn.Linear(a.width, embedded), nn.SiLU(), nn.Linear(embedded, embedded))

        def block(wide_in: int, wide_out: int, resize: str = "") -> _Residual:
            return _Residual(wide_in, wide_out, embedded, a.groups, resize)

        def attend(wide: int, side: int) -> list[nn.Module]:
            return [_Attention(wide, a.head_width, a.groups)] if side in a.attention else []

        wide, side = a.width * a.multipliers[0], a.size
        self.input_blocks = nn.ModuleList([_Stage([_convolution(a.channels, wide)])])
        kept = [wide]  # channels of the maps that the way up reads again
        for level, multiplier in enumerate(a.multipliers):
            if level:
                side //= 2
                self.input_blocks.append(_Stage([block(wide, wide, "down")]))
                kept.append(wide)
            for _ in range(a.blocks):
                self.input_blocks.append(_Stage([block(wide, a.width * multiplier), *attend(a.width * multiplier, side)]))
                wide = a.width * multiplier
                kept.append(wide)
        middle = [_Attention(wide, a.head_width, a.groups)] if a.attention else []
        self.middle_block = _Stage([block(wide, wide), *middle, block(wide, wide)])
        self.output_blocks = nn.ModuleList()
        for level, multiplier in reversed(list(enumerate(a.multipliers))):
            for i in range(a.blocks + 1):
                layers = [block(wide + kept.pop(), a.width * multiplier), *attend(a.width * multiplier, side)]
                wide = a.width * multiplier
                if level and i == a.blocks:
                    layers.append(block(wide, wide, "up"))
                    side *= 2
                self.output_blocks.append(_Stage(layers))
        last = _zero(_convolution(wide, a.channels * (2 if a.learned_variance else 1)))
        self.out = nn.Sequential(nn.GroupNorm(a.groups, wide), nn.SiLU(), last)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        """Return the noise in the images."""
        emb = self.time_embed(embedding(steps, self.architecture.width).to(x.dtype))
        maps = []
        for stage in self.input_blocks:
            x = stage(x, emb)
            maps.append(x)
        x = self.middle_block(x, emb)
        for stage in self.output_blocks:
            x = stage(torch.cat([x, maps.pop()], dim=1), emb)
        return self.out(x)


def embedding(steps: Tensor, width: int) -> Tensor:
    """Return cosines and sines of the steps, at wave lengths from 2 pi to 10000 times that."""
    half = width // 2
    rates = torch.exp(-math.log(10000) / half * torch.arange(half, device=steps.device, dtype=torch.float32))
    angles = steps[:, None].float() * rates
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=1), (0, width % 2))


class _Stage(nn.ModuleList):
    """A sequence of layers, of which the residual ones also take the embedding of the step."""

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, emb) if isinstance(layer, _Residual) else layer(x)
        return x


class _Residual(nn.Module):
    """A residual block that may halve or double the resolution."""

    def __init__(self, wide_in: int, wide_out: int, embedded: int, groups: int, resize: str) -> None:
        super().__init__()
        self.resize = resize
        self.in_layers = nn.Sequential(nn.GroupNorm(groups, wide_in), nn.SiLU(), _convolution(wide_in, wide_out))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embedded, 2 * wide_out))
        # the third layer is a dropout in training; sampling does not need it
        self.out_layers = nn.Sequential(
            nn.GroupNorm(groups, wide_out), nn.SiLU(), nn.Identity(), _zero(_convolution(wide_out, wide_out))
        )
        self.skip_connection = nn.Identity() if wide_in == wide_out else nn.Conv2d(wide_in, wide_out, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self._resized(self.in_layers[:2](x))
        h = self.in_layers[2](h)
        scale, shift = self.emb_layers(emb)[:, :, None, None].chunk(2, dim=1)
        h = self.out_layers[0](h) * (1 + scale) + shift
        return self.skip_connection(self._resized(x)) + self.out_layers[1:](h)

    def _resized(self, x: Tensor) -> Tensor:
        if self.resize == "down":
            return F.avg_pool2d(x, 2)
        return F.interpolate(x, scale_factor=2, mode="nearest") if self.resize == "up" else x


class _Attention(nn.Module):
    """Self-attention over all positions of a map.

    The projection has queries, keys and values of each head together, one head after another.
    """

    def __init__(self, wide: int, head_width: int, groups: int) -> None:
        super().__init__()
        self.heads = wide // head_width
        self.norm = nn.GroupNorm(groups, wide)
        self.qkv = nn.Conv1d(wide, 3 * wide, 1)
        self.proj_out = _zero(nn.Conv1d(wide, wide, 1))

    def forward(self, x: Tensor) -> Tensor:
        places = x.flatten(2)
        q, k, v = self.qkv(self.norm(places)).unflatten(1, (self.heads, 3, -1)).transpose(-2, -1).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(-2, -1).flatten(1, 2)
        return x + self.proj_out(attended).view_as(x)


def _convolution(wide_in: int, wide_out: int) -> nn.Conv2d:
    return nn.Conv2d(wide_in, wide_out, 3, padding=1)


def _zero(layer: nn.Module) -> nn.Module:
    """Set the parameters of a layer to zero, so that its initial output is zero, and return the layer."""
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer


# ---- files ------------------------------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], unet: UNet, about: Mapping[str, str]) -> None:
    """Write the weights in half precision, and the architecture, to a safetensors file."""
    weights = {name: p.detach().half().contiguous() for name, p in unet.state_dict().items()}
    write_whole(Path(path), save(weights, {ARCHITECTURE: json.dumps(asdict(unet.architecture)), **about}))


def read(path: str | os.PathLike[str]) -> UNet:
    """Read a U-Net from a file: *.safetensors from `write`, or *.pt with a state dict of the default architecture.

    Raises:
        StateError: The file is damaged, or its parameters are not those of the architecture; the message names the first
            one.
    """
    if Path(path).exists():
        require_regular(Path(path), Path(path).stat())
    weights, architecture = _safetensors(path) if Path(path).suffix == ".safetensors" else (_pickled(path), Architecture())
    with torch.device("meta"):  # avoids the random initialisation of half a billion parameters
        unet = UNet(architecture)
    fill(unet, weights, path)
    return unet.eval()


def fill(unet: UNet, weights: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Set the weights of the network, in single precision; on an error the network does not change."""
    for problem in _problems(unet.state_dict(), weights):
        raise StateError(f"{path} does not hold the weights of this U-Net ({unet.architecture}): {problem}.")
    unet.load_state_dict({name: weights[name].float() for name in unet.state_dict()}, assign=True)


def _problems(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in mine.items():
        if name not in theirs:
            yield f"{name} is missing"
        elif theirs[name].shape != tensor.shape:
            yield f"{name} is {tuple(theirs[name].shape)} in the file, {tuple(tensor.shape)} here"
    yield from (f"{name} is unknown" for name in theirs if name not in mine)


def _pickled(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise StateError(f"There is no file {path}.") from None
    except Exception as error:  # torch raises errors of many types for a damaged file
        raise StateError(f"{path} cannot be read as a state dict ({first_line(error)}).") from error
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise StateError(f"{path} is not a state dict: names of parameters, and tensors.")
    return dict(weights)


def _safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Architecture]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise StateError(f"There is no file {path}.") from None
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path} cannot be read as a safetensors file ({error}).") from error
    return weights, _architecture(path, header.get(ARCHITECTURE, ""))


def _architecture(path: str | os.PathLike[str], text: str) -> Architecture:
    try:
        values: dict[str, Any] = json.loads(text)
        return Architecture(**{field.name: values[field.name] for field in fields(Architecture)})
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path}: its header does not say of what architecture it is ({error!r}).") from error
