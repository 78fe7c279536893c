"""One structural view of a vision transformer, whoever wrote it.

Methods choose what to adapt from this view (`vit.blocks[:9]`, `vit.norms`), never by matching parameter names. What is
special about timm, Hugging Face and torchvision is in `families/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata

import torch
from torch import Tensor, nn

from ..errors import InputError, ModelError
from .surgery import ClassTokenBlock, OpenAttention, PromptedBlock, tap

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


@dataclass
class Block:
    """One transformer block, `x += scale1(attention(norm1(x)))`, then `x += scale2(mlp(norm2(x)))`."""

    module: nn.Module
    attention_name: str
    open_attention: Callable[[nn.Module, int], OpenAttention]
    heads: int
    norm1: nn.Module
    norm2: nn.Module
    mlp: nn.Module
    scale1: nn.Module = field(default_factory=nn.Identity)
    scale2: nn.Module = field(default_factory=nn.Identity)

    @property
    def attention(self) -> nn.Module:
        return getattr(self.module, self.attention_name)

    @property
    def norms(self) -> list[nn.Module]:
        """Every normalisation layer inside the block, those of the attention included."""
        return [module for module in self.module.modules() if isinstance(module, NORMS)]

    def open(self) -> OpenAttention:
        """Put an `OpenAttention` in the attention's place, or return the one that is there."""
        if not isinstance(self.attention, OpenAttention):
            setattr(self.module, self.attention_name, self.open_attention(self.attention, self.heads))
        attention = self.attention
        assert isinstance(attention, OpenAttention)
        return attention

    def close(self) -> None:
        """Put the original attention module back."""
        if isinstance(self.attention, OpenAttention):
            setattr(self.module, self.attention_name, self.attention.inner)


@dataclass
class ViT:
    """A vision transformer with a class token: where its parts are, and how to run it."""

    model: nn.Module
    family: str
    blocks: list[Block]
    head: nn.Linear
    width: int
    tokens: int  # of an image of the usual size, class token included
    channels: int
    image_size: tuple[int, int] | None  # None: any size the model itself accepts
    class_token_suffices: bool  # for the last block: the head reads no other token, and its attention can be short-cut
    _blocks: nn.Module  # the container, to exchange the last block
    prefix: int = 1  # of the tokens, so many stand before the patches: the class token, and registers if there are any
    _read: bool = False  # whether somebody reads tokens of the last block that the head does not
    _own_head: nn.Linear | None = None  # of the model, while another one is in its place

    @property
    def norms(self) -> list[nn.Module]:
        """Every normalisation layer of the model, in order."""
        return [module for module in self.model.modules() if isinstance(module, NORMS)]

    @property
    def classes(self) -> int:
        return self.head.out_features

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def precise(self) -> torch.dtype:
        """The type of what is remembered of the outputs: that of the weights, and at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def version(self) -> dict[str, str]:
        """Of the library that the model comes from."""
        package = {"hf": "transformers"}.get(self.family, self.family)
        return {package: metadata.version(package)}

    def logits(self, images: Tensor) -> Tensor:
        out = self.model(images)
        return getattr(out, "logits", out)  # Hugging Face wraps them in an output object

    def check(self, images: Tensor) -> Tensor:
        """The images on the model's device and in its type, or an `InputError` that says what is wrong with them."""
        if not isinstance(images, Tensor):
            raise InputError(f"Images must be a torch.Tensor, not {type(images).__name__}.")
        shape = tuple(images.shape)
        size = self.image_size or ("height", "width")
        expected = f"(batch, {self.channels}, {size[0]}, {size[1]})"
        if images.ndim != 4:
            hint = " Add the batch dimension with images[None]." if images.ndim == 3 else ""
            raise InputError(f"Expected images of shape {expected}, got {shape}.{hint}")
        if not len(images):
            raise InputError(f"The batch is empty: shape {shape}. Pass at least one image.")
        if shape[1] != self.channels or (self.image_size is not None and shape[2:] != self.image_size):
            raise InputError(f"Expected images of shape {expected}, got {shape}. Resize, crop or convert them first.")
        if not images.is_floating_point():
            raise InputError(
                f"Images have the integer type {images.dtype}: convert them to float and normalise as the model expects."
            )
        images = images.detach().to(self.device, self.dtype, non_blocking=True)
        finite = images.isfinite().flatten(1).all(1)
        if not finite.all():
            bad = (~finite).nonzero().flatten().tolist()
            raise InputError(f"NaN or Inf in image {', '.join(map(str, bad[:8]))} of the batch: remove or repair it.")
        return images.clone() if images.is_inference() else images

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the head, (batch, width), and the logits that come out of it."""
        with tap([self.head]) as seen:
            logits = self.logits(images)
        return seen[self.head].entered, logits

    def class_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The class token behind every block, side by side, and the logits.

        Behind a block it is as the next block's first norm leaves it; behind the last one it is what enters the head.
        """
        norms = [block.norm1 for block in self.blocks[1:]]
        with tap([*norms, self.head]) as seen:
            logits = self.logits(images)
        tokens = [seen[norm].left[:, 0] for norm in norms]
        return torch.cat([*tokens, seen[self.head].entered], dim=1), logits

    @property
    def class_tokens_width(self) -> int:
        return (len(self.blocks) - 1) * self.width + self.head.in_features

    @property
    def layers(self) -> list[nn.Module]:
        """The modules that run in the blocks' places: the blocks themselves, or what surgery put around them."""
        return list(self._blocks.children())

    def prompt(self, prompts: Mapping[int, nn.Parameter], *, read: bool = False) -> None:
        """Insert tokens, (count, width), behind the class token of a block's input; call this once, before `shorten`.

        They stay until a block that has its own, and never reach the head. Say `read` if what becomes of them is going to be
        read (`tap` the blocks' modules): then the last block is not shortened.
        """
        self._read = read
        count = 0
        for i, layer in enumerate(self.layers):
            own = prompts.get(i)
            replaced = 0
            if own is not None:
                replaced, count = count, len(own)
            dropped = count if i == len(self.blocks) - 1 else 0
            if own is not None or dropped:
                self._put(i, PromptedBlock(layer, own, replaced=replaced, dropped=dropped))

    def exchange_head(self, head: nn.Linear) -> None:
        """Classify by another layer of the same shape; call this once."""
        self._own_head = self.head
        self._put_head(head)

    def _put_head(self, head: nn.Linear) -> None:
        for module in self.model.modules():
            for name, child in module.named_children():
                if child is self.head:
                    module._modules[name] = head
        self.head = head

    def shorten(self) -> None:
        """Compute the last block for the class token alone, if that suffices."""
        if self.class_token_suffices and not self._read:
            self.blocks[-1].open().class_only = True
            short = ClassTokenBlock(self.blocks[-1])
            last = self.layers[-1]
            if isinstance(last, PromptedBlock):
                last.inner = short
            else:
                self._put(-1, short)

    def restore(self) -> None:
        """Undo all surgery; parameter values are not touched."""
        if self._own_head is not None:
            self._put_head(self._own_head)
            self._own_head = None
        for i, block in enumerate(self.blocks):
            self._put(i, block.module)
            block.close()

    def _put(self, i: int, module: nn.Module) -> None:
        self._blocks._modules[list(self._blocks._modules)[i]] = module


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that the modules themselves own, each once; none at all is an error."""
    modules = list(modules)
    found = list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))
    if not found:
        kinds = ", ".join(sorted({type(m).__name__ for m in modules})) or "none"
        raise ModelError(f"Nothing to adapt: no layer with parameters was selected (layers: {kinds}).")
    return found


def samples_interact(model: nn.Module) -> bool:
    """Whether one sample's output depends on the rest of its batch, as with BatchNorm on batch statistics."""
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def title(model: nn.Module) -> str:
    """Return the library and the class of a model, for messages."""
    return f"{type(model).__module__.split('.')[0]} {type(model).__name__}"


def require(model: nn.Module, condition: bool, what: str) -> None:
    """Raise a `ModelError` for a model that cannot be adapted, unless the condition holds."""
    if not condition:
        raise ModelError(f"{title(model)} cannot be adapted: {what}.")
