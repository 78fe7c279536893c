"""A structural view of a vision transformer, the same for all libraries.

Methods choose what to adapt from this view (`vit.blocks[:9]`, `vit.norms`), and never by matching parameter names. The code
that is specific to timm, transformers and torchvision is in `families/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..errors import InputError, ModelError
from .images import ordinary
from .plain import TOKEN_WISE, all_modules_are_hooked, is_hooked, runs_code_of
from .surgery import ClassTokenBlock, OffsetNorm, OpenAttention, PromptedBlock, capture, selecting

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


@dataclass
class Block:
    """One transformer block.

    A plain one computes `x += scale1(attention(norm1(x)))`, then `x += scale2(mlp(norm2(x)))`.
    """

    module: nn.Module
    path: str  # the name of the module in the model
    attention_name: str
    open_attention: Callable[[nn.Module, int], OpenAttention] | None  # None if the attention runs code of its own
    heads: int  # 0 if it is not known
    norm1: nn.Module
    norm2: nn.Module
    mlp: nn.Module
    scale1: nn.Module = field(default_factory=nn.Identity)
    scale2: nn.Module = field(default_factory=nn.Identity)

    @property
    def attention(self) -> nn.Module:
        """The attention module, or the `OpenAttention` that replaces it."""
        return getattr(self.module, self.attention_name)

    @property
    def norms(self) -> list[nn.Module]:
        """The normalisation layers inside the block, including those of the attention."""
        return [module for module in self.module.modules() if isinstance(module, NORMS)]

    def opened(self) -> OpenAttention:
        """Return the attention as an `OpenAttention`, without a change of the model.

        Raises:
            ModelError: If the attention runs code of its own.
        """
        if isinstance(self.attention, OpenAttention):
            return self.attention
        if self.open_attention is None:
            raise ModelError(
                f"{self.path}.{self.attention_name}, a {type(self.attention).__name__}, runs code of its own, so that its "
                "queries and keys cannot be seen or extended: merge what was added to it (with peft: merge_and_unload()), "
                "leave this block out (blocks=), or choose a method that does not change the attention."
            )
        return self.open_attention(self.attention, self.heads)

    def open(self) -> OpenAttention:
        """Replace the attention by an `OpenAttention`, and return it. If it is already open, return it as it is."""
        attention = self.opened()
        setattr(self.module, self.attention_name, attention)
        return attention

    def close(self) -> None:
        """Put the original attention module back."""
        attention = self.attention
        if isinstance(attention, OpenAttention):
            attention.close()
            setattr(self.module, self.attention_name, attention.inner)


@dataclass
class ViT:
    """A vision transformer with a class token: its parts, and functions that run it."""

    model: nn.Module
    family: str
    blocks: list[Block]
    head: nn.Linear  # or another layer with `in_features` and `out_features`
    width: int
    tokens: int  # for an image of the default size, including the class token
    channels: int
    image_size: tuple[int, int] | None  # None: any size that the model accepts
    class_token_suffices: bool  # whether the last block can be computed for this token only
    plain: frozenset[type]  # the classes of a plain last block and of what is around it
    after: tuple[str, ...]  # the names of the modules that get all tokens after the last block
    _blocks: nn.Module  # the module that contains the blocks
    prefix: int = 1  # number of tokens before the patches: the class token and registers
    _read: bool = False  # whether other tokens of the last block are read than the head reads
    _own_head: nn.Linear | None = None  # the model's own head, while another one replaces it

    @property
    def norms(self) -> list[nn.Module]:
        """The normalisation layers of the model, in order."""
        return [module for module in self.model.modules() if isinstance(module, NORMS)]

    @property
    def classes(self) -> int:
        """The number of classes of the head."""
        return self.head.out_features

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self._weight.dtype

    @property
    def _weight(self) -> nn.Parameter:
        """The first parameter of the head, or of the model if the head has none, as a quantised one."""
        parameters = (p for module in (self.head, self.model) for p in module.parameters() if p.is_floating_point())
        return next(parameters)

    @property
    def precise(self) -> torch.dtype:
        """The type of what is remembered of the outputs: that of the weights, and at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def version(self) -> dict[str, str]:
        """The version of the library that the model comes from, by the name of the library."""
        package = {"hf": "transformers"}.get(self.family, self.family)
        return {package: metadata.version(package)}

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits of a batch, (batch, classes)."""
        out = self.model(images)
        return getattr(out, "logits", out)  # transformers returns an object with the logits

    def check(self, images: Tensor) -> Tensor:
        """Return the images on the model's device and in its type, or raise an `InputError` if they cannot be used."""
        if not isinstance(images, Tensor):
            raise InputError(f"Images must be a torch.Tensor, not {type(images).__name__}.")
        images = ordinary(images)
        shape = tuple(images.shape)
        size = self.image_size or ("height", "width")
        expected = f"(batch, {self.channels}, {size[0]}, {size[1]})"
        if images.ndim != 4:
            hint = " Add the batch dimension with images[None]." if images.ndim == 3 else ""
            raise InputError(f"Expected images of shape {expected}, got {shape}.{hint}")
        if not images.numel():
            raise InputError(f"The batch is empty: shape {shape}. Pass at least one image.")
        if shape[1] != self.channels or (self.image_size is not None and shape[2:] != self.image_size):
            raise InputError(f"Expected images of shape {expected}, got {shape}. Resize, crop or convert them first.")
        images = images.detach().to(self.device, self.dtype, non_blocking=True)
        finite = images.isfinite().flatten(1).all(1)
        if not finite.all():
            bad = (~finite).nonzero().flatten().tolist()
            raise InputError(f"NaN or Inf in image {', '.join(map(str, bad[:8]))} of the batch: remove or repair it.")
        return images.clone() if images.is_inference() else images

    @torch.no_grad()
    def require_logits_of_head(self) -> None:
        """Refuse a model that changes the logits after its head, for a method that calls the head itself."""
        holders = [module for module in self.model.modules() if any(child is self.head for child in module.children())]
        if all(runs_code_of(m, self.plain) and not is_hooked(m) for m in (self.model, *holders, self.head)):
            return
        height, width = self.image_size or (224, 224)
        image = torch.rand(1, self.channels, height, width, generator=torch.Generator().manual_seed(0))
        features, logits = self.features(image.to(self.device, self.dtype))
        require_supported(
            self.model,
            _is_close(self.head(features), logits),
            "it changes the logits after its head, and this method calls the head alone. Make the change inside of the "
            "head, or choose another method",
        )

    @torch.no_grad()
    def head_weight(self) -> Tensor:
        """Return the weight that acts in the head, (classes, width of the head).

        Raises:
            ModelError: If the head is not a linear function of the features.
        """
        if runs_code_of(self.head, TOKEN_WISE) and not is_hooked(self.head):
            return self.head.weight
        unit = torch.eye(self.head.in_features, dtype=self.dtype, device=self.device)
        bias = self.head(torch.zeros_like(unit[:1]))
        weight = (self.head(unit) - bias).T
        other = torch.rand(1, len(unit), generator=torch.Generator().manual_seed(0)).to(unit)
        require_supported(
            self.model,
            _is_close(other @ weight.T + bias, self.head(other)),
            f"its head, a {type(self.head).__name__}, is not a linear function of the features, so that it has no row for "
            "each class. Put a torch.nn.Linear there, or choose another method",
        )
        return weight

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features that enter the head, (batch, width), and the logits."""
        with capture([self.head]) as seen:
            logits = self.logits(images)
        return seen[self.head].inputs, logits

    def class_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class tokens after all blocks, concatenated, and the logits.

        After a block, the class token is taken as the first norm of the next block returns it. After the last block, it is
        what enters the head.
        """
        norms = [block.norm1 for block in self.blocks[1:]]
        with capture([*norms, self.head]) as seen:
            logits = self.logits(images)
        tokens = [seen[norm].outputs[:, 0] for norm in norms]
        return torch.cat([*tokens, seen[self.head].inputs], dim=1), logits

    @property
    def class_tokens_width(self) -> int:
        """The length of the concatenated class tokens of one image."""
        return (len(self.blocks) - 1) * self.width + self.head.in_features

    def class_attention(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention of the class token to each patch in the last block, averaged over the heads, and the logits.

        No gradient passes through the attention.
        """
        attention = self.blocks[-1].open()
        with capture([attention]) as seen:
            logits = self.logits(images)
        with torch.no_grad():
            q, k, _ = attention.project(seen[attention].inputs)
            scale = q.shape[-1] ** -0.5 if attention.scale is None else attention.scale
            weights = (q[:, :, :1] @ k.transpose(-2, -1) * scale).softmax(-1)
        return weights.mean(1)[:, 0, self.prefix :], logits

    def logits_of_patches(self, images: Tensor, patches: Tensor) -> Tensor:
        """Return the logits of images of which the blocks get only the patches with these numbers, (batch, count)."""
        prefix = torch.arange(self.prefix, device=patches.device).expand(len(patches), -1)
        with selecting(self.layers[0], torch.cat([prefix, patches + self.prefix], dim=1)):
            return self.logits(images)

    @property
    def layers(self) -> list[nn.Module]:
        """The modules that run in place of the blocks: the blocks, or the modules that surgery put around them."""
        return list(self._blocks.children())

    def prompt(self, prompts: Mapping[int, nn.Parameter], *, read: bool = False) -> None:
        """Insert prompts, (count, width), after the class token of the input of given blocks.

        Prompts stay in the sequence up to the next block that has its own, and never reach the head. Call this method once,
        before `shorten`. Set `read` if the outputs of the prompts will be read, for example by `capture`. The last block is
        not shortened then.
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

    def offset_norm(self, norm: nn.LayerNorm, offsets: Callable[[Tensor], tuple[Tensor, Tensor]]) -> nn.Module:
        """Give the scale and the shift of a norm an offset for each sample, and return the module that replaces it.

        `offsets` is a function from the input of the norm, of all tokens: the last block is not shortened then.
        """
        self._read = True
        replacement = OffsetNorm(norm, offsets)
        self._exchange(norm, replacement)
        return replacement

    def exchange_head(self, head: nn.Linear) -> None:
        """Replace the head by another layer of the same shape. Call this method at most once."""
        self._own_head = self.head
        self._put_head(head)

    def _put_head(self, head: nn.Linear) -> None:
        self._exchange(self.head, head)
        self.head = head

    def _exchange(self, old: nn.Module, new: nn.Module) -> None:
        """Put a module in place of another one, in the model and in the view of its block."""
        for module in list(self.model.modules()):
            for name, child in module.named_children():
                if child is old and module is not new:
                    module._modules[name] = new
        for block in self.blocks:
            if block.norm1 is old:
                block.norm1 = new
            if block.norm2 is old:
                block.norm2 = new

    def convert_own_head(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a conversion of the model to its own head, if another one replaces it."""
        if self._own_head is not None:
            self._own_head._apply(fn)

    def shorten(self) -> None:
        """Compute the last block for the class token only, if the head reads no other token, as long as it is plain."""
        if self.class_token_suffices and not self._read and self.blocks[-1].open_attention is not None:
            self.blocks[-1].open()
            short = ClassTokenBlock(self)
            last = self.layers[-1]
            if isinstance(last, PromptedBlock):
                last.inner = short
            else:
                self._put(-1, short)

    def ends_plainly(self) -> bool:
        """Return whether the last block and what follows it run the code of their library, and have no hooks.

        Otherwise they may read or change other tokens than the class token.
        """
        block = self.blocks[-1]
        inside = [*self.layers[-1].modules()]
        after = [self.model.get_submodule(name) for name in self.after]
        return (
            not all_modules_are_hooked()
            and runs_code_of(self.model, self.plain)
            and all(runs_code_of(module, self.plain) and not is_hooked(module) for module in (*inside, *after))
            and all(part in inside for part in (block.norm1, block.norm2, block.mlp))  # and not taken out since
            and isinstance(block.attention, OpenAttention)
            and block.attention.is_product()
        )

    def is_library_code(self) -> bool:
        """Return whether the model runs code of torch and of its own library alone, without hooks."""
        libraries = {kind.__module__.partition(".")[0] for kind in self.plain}
        return all(
            type(module).__module__.partition(".")[0] in libraries
            and runs_code_of(module, frozenset({type(module)}))
            and not is_hooked(module)
            for module in self.model.modules()
        )

    def restore(self) -> None:
        """Undo all surgery. The values of the parameters are not changed."""
        if self._own_head is not None:
            self._put_head(self._own_head)
            self._own_head = None
        for i, block in enumerate(self.blocks):
            self._put(i, block.module)
            block.close()
        for module in list(self.model.modules()):
            if isinstance(module, OffsetNorm):
                self._exchange(module, module.inner)

    def _put(self, i: int, module: nn.Module) -> None:
        self._blocks._modules[list(self._blocks._modules)[i]] = module


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of the modules themselves, each once, and raise a `ModelError` if there are none."""
    modules = list(modules)
    found = list(dict.fromkeys(p for module in modules for p in _own_parameters(module)))
    if not found:
        kinds = ", ".join(sorted({type(m).__name__ for m in modules})) or "none"
        raise ModelError(f"Nothing to adapt: no layer with parameters was selected (layers: {kinds}).")
    return found


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module itself, and those that its parametrisations compute its weights from."""
    yield from module.parameters(recurse=False)
    if is_parametrized(module):
        parametrizations: Any = module.parametrizations
        for originals in parametrizations.values():
            yield from originals.parameters(recurse=False)


def layer_without_gradient(model: nn.Module) -> str | None:
    """Return the name of a layer that passes no gradient because torch has quantised it, or None if there is none."""
    quantised = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
    return next((name for name, module in model.named_modules() if type(module).__module__.startswith(quantised)), None)


def require_gradient(without: str | None) -> None:
    """Refuse a model with a layer that passes no gradient: the gradient would be wrong without any error."""
    if without is not None:
        raise ModelError(
            f"{without} is a quantised layer, which passes no gradient: adapt the model before it is quantised, or choose a "
            "method that needs no gradient (source, t3a, lame, foa)."
        )


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are equal but for rounding in the type that they have."""
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def samples_interact(model: nn.Module) -> bool:
    """Return whether the output of a sample depends on its batch.

    That is so with BatchNorm on batch statistics, and with quantised layers, which choose a range for a whole batch.
    """
    return layer_without_gradient(model) is not None or any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def title(model: nn.Module) -> str:
    """Return the library and the class of a model, for messages."""
    return f"{type(model).__module__.split('.')[0]} {type(model).__name__}"


def require_supported(model: nn.Module, condition: bool, what: str) -> None:
    """Raise a `ModelError` that says why a model cannot be adapted, unless the condition holds."""
    if not condition:
        raise ModelError(f"{title(model)} cannot be adapted: {what}.")
