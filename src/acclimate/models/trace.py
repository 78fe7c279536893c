"""What one pass of two images shows of a model: its classes, its linear head, and the size of its activations.

A model that acclimate does not know may have any structure. The pass finds the layer whose output is the logits, and this
layer is the head. Its input are the features. The logits may also be a sum of the outputs of several layers, times constant
factors: a distilled DeiT returns the mean of two heads, and other models divide the logits by a temperature. The pass also
finds the modules in which the tokens of an image attend to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ModelError, first_line
from .multihead import is_usual
from .plain import ours

USUAL_SIZES = (224, 32, 64, 96, 28, 128, 256, 299, 384, 448, 512, 160, 192, 240, 288, 320, 336, 48, 80, 112)
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")  # the names of their parameters
SMALLEST_FACTOR = 1e-3  # of a layer that counts as a head
ROUNDING = 32  # errors of rounding that a sum of heads may have
OUTPUTS_OF_VIT = 132  # of its layers per token and unit of width in ViT-B, to which `MicroBatches` refers


@dataclass(frozen=True)
class Attention:
    """A module in which all tokens of an image attend to each other, once in a pass."""

    module: nn.Module
    heads: int
    tokens: int
    width: int  # of all heads


@dataclass(frozen=True)
class Trace:
    """What the pass showed."""

    channels: int
    size: tuple[int, int]  # of the images that were passed
    classes: int
    heads: tuple[tuple[nn.Module, float], ...]  # linear layers whose outputs, times these factors, sum to the logits
    work: int  # outputs of all layers for one image, in the unit of `MicroBatches`
    attentions: tuple[Attention, ...] = ()  # in the order of the pass; none unless all have the same shape
    class_token: bool = False  # whether the first token is a class token


def trace(model: nn.Module) -> Trace:
    """Pass two random images through a model, and return what was seen. The model is not changed.

    Raises:
        ModelError: If the model takes no images of a usual size, or does not return logits.
    """
    training = {module: module.training for module in model.modules()}
    failure: Exception | None = None
    try:
        model.eval()
        for channels, size in product(_channels(model), dict.fromkeys(_sizes(model))):
            try:
                return _pass(model, channels, size)
            except ModelError:
                raise
            except TypeError as error:  # of any size
                raise ModelError(
                    f"{title(model)} cannot be adapted: it did not take a batch of images as its only argument "
                    f"({first_line(error)}). Wrap it in a module that passes the images on and returns logits."
                ) from error
            except Exception as error:  # a model may raise anything for images that it does not take
                failure = failure or error
    finally:
        for module, was in training.items():
            module.training = was
    problem = first_line(failure or ModelError())
    raise ModelError(
        f"{title(model)} cannot be adapted: it took no random images of a usual size ({problem}). "
        "Say what it takes: model.pretrained_cfg = {'input_size': (channels, height, width)}."
    )


def title(model: nn.Module) -> str:
    """Return the library and the class of a model, for messages."""
    return f"{type(model).__module__.split('.')[0]} {type(model).__name__}"


def logits_of(out: Any) -> Any:
    """Return the logits in the output of a model. transformers returns an object with the logits."""
    return getattr(out, "logits", out)


def weight_of(*modules: nn.Module) -> Tensor:
    """Return the first parameter or buffer of real numbers in these modules, which shows device and type."""
    parameters = (p for module in modules for p in module.parameters())
    buffers = (b for module in modules for b in module.buffers())
    return next((tensor for tensor in chain(parameters, buffers) if tensor.is_floating_point()), torch.zeros(0))


@torch.no_grad()
def _pass(model: nn.Module, channels: int, size: tuple[int, int]) -> Trace:
    like = weight_of(model)
    images = torch.rand(2, channels, *size, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    outputs: dict[nn.Module, Tensor] = {}  # of the layers, in the order of the pass
    amount = 0

    @ours
    def seen(module: nn.Module, args: Any, out: Any) -> None:
        nonlocal amount
        if isinstance(out, Tensor):
            amount += out.numel()
            outputs.pop(module, None)
            outputs[module] = out

    inside: list[nn.Module] = []  # the modules that are running

    @ours
    def enter(module: nn.Module, args: Any) -> None:
        inside.append(module)

    @ours
    def leave(module: nn.Module, args: Any, out: Any) -> None:
        inside.pop()

    layers = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    hooks = [layer.register_forward_hook(seen) for layer in layers]
    hooks += [module.register_forward_pre_hook(enter) for module in model.modules()]
    hooks += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        with _Attending(inside) as attending:
            logits = logits_of(model(images))
        activations, first = amount, dict(outputs)
        heads = _heads(first, logits)
        if any(factor != 1 for _, factor in heads):  # images of another contrast show whether the factors are constant
            again = logits_of(model(1 - 3 * images))
            heads = heads if _sums_to(heads, outputs, again) else ()
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != 2:
        got = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ModelError(
            f"{title(model)} cannot be adapted: for two images it returns {got}, and not logits, (batch, classes). Wrap it "
            "in a module that returns logits."
        )
    work = max(1, activations // len(images) // OUTPUTS_OF_VIT)
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    return Trace(
        channels,
        size,
        logits.shape[1],
        heads,
        work,
        attending.found(len(images)),
        not names.isdisjoint(CLASS_TOKENS),
    )


class _Attending(TorchFunctionMode):
    """Note in which modules attention is computed.

    Args:
        inside: The modules that are running at any time, the innermost last.
    """

    def __init__(self, inside: list[Any]) -> None:
        super().__init__()
        self.inside = inside
        self.calls: list[tuple[nn.Module, torch.Size, torch.Size]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and self.inside and len(args) >= 3:
            self.calls.append((self.inside[-1], args[0].shape, args[1].shape))
        if func is F.multi_head_attention_forward and is_usual(self.inside[-1]) and not self._is_skipped():
            heads = self.inside[-1].num_heads
            shapes = [torch.Size((x.shape[1], heads, x.shape[0], x.shape[2] // heads)) for x in args[:2]]
            self.calls.append((self.inside[-1], *shapes))
        return func(*args, **(kwargs or {}))

    def _is_skipped(self) -> bool:
        """Return whether the attention that is running is not called without gradients: torch has a faster way there."""
        return any(isinstance(module, nn.TransformerEncoderLayer) for module in self.inside)

    def found(self, images: int) -> tuple[Attention, ...]:
        """Return the modules in which the tokens of each image attend to each other, if all have the same shape."""
        own = [(module, q) for module, q, k in self.calls if q == k]
        whole = all(len(q) == 4 and q[0] == images for _, q in own)  # in windows, there are more
        alike = whole and len({q for _, q in own}) == 1 and len({module for module, _ in own}) == len(own)
        return tuple(Attention(module, q[1], q[2], q[1] * q[3]) for module, q in own) if alike else ()


def width_of(module: nn.Module) -> int:
    """Return the length of the features that a linear layer takes, and 0 for any other module.

    A convolution of single pixels is a linear layer, too.
    """
    if isinstance(module, nn.Conv2d):
        return module.in_channels if module.kernel_size == (1, 1) and module.groups == 1 else 0
    sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
    return int(sizes[0] or 0) if all(isinstance(size, int) for size in sizes) else 0


def _heads(outputs: dict[nn.Module, Tensor], logits: Any) -> tuple[tuple[nn.Module, float], ...]:
    """Return the linear layers whose outputs, times constant factors, sum to the logits; none if there are none."""
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        return ()
    found = {m: out.flatten(1) for m, out in outputs.items() if width_of(m) and out.flatten(1).shape == logits.shape}
    same = [m for m, out in found.items() if torch.equal(out.to(logits.dtype), logits)]
    if same:
        return ((same[-1], 1.0),)
    if not 0 < len(found) < logits.shape[1]:  # more layers could sum to anything
        return ()
    columns = torch.stack([out.flatten() for out in found.values()], dim=1).double().cpu()
    factors = torch.linalg.lstsq(columns, logits.double().cpu().reshape(-1, 1)).solution.flatten().tolist()
    heads = tuple((m, factor) for m, factor in zip(found, factors) if abs(factor) > SMALLEST_FACTOR)
    return heads if _sums_to(heads, outputs, logits) else ()


def _sums_to(heads: tuple[tuple[nn.Module, float], ...], outputs: dict[nn.Module, Tensor], logits: Tensor) -> bool:
    """Return whether the outputs of layers, times these factors, sum to the logits, but for rounding."""
    total = sum((factor * outputs[m].flatten(1).double() for m, factor in heads), torch.zeros_like(logits.double()))
    return bool((total - logits).abs().max() <= ROUNDING * torch.finfo(logits.dtype).eps * logits.abs().max())


def _channels(model: nn.Module) -> tuple[int, ...]:
    """Return the numbers of channels that a model may take."""
    configured = [config[0] for config in _input_sizes(model)]
    first = [m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)][:1]
    return tuple(dict.fromkeys([*first, *configured] or [3, 1]))


def _sizes(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the image sizes that a model may take. Those that its parts were built for come first."""
    for module in model.modules():
        for size in (getattr(module, "img_size", None), getattr(getattr(module, "config", None), "image_size", None)):
            pair = (size, size) if isinstance(size, int) else size
            if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(side, int) for side in pair):
                yield pair[0], pair[1]
    for _, height, width in _input_sizes(model):
        yield height, width
    yield from ((side, side) for side in USUAL_SIZES)


def _input_sizes(model: nn.Module) -> list[tuple[int, int, int]]:
    """Return the input sizes in the configurations of a model and its parts, in the form of timm."""
    configs = [getattr(module, "pretrained_cfg", None) for module in model.modules()]
    sizes = [config.get("input_size") for config in configs if isinstance(config, dict)]
    return [tuple(size) for size in sizes if isinstance(size, (tuple, list)) and len(size) == 3]
