"""A structural view of an image classifier, the same for all libraries.

Methods choose what to adapt from this view (`view.blocks[:9]`, `view.norms`), and never by matching parameter names. A view
offers the parts that its model has (`PARTS`), and a method names those that it needs (`Info.requires`). Any module that
returns logits has a view. What is specific to the vision transformers of timm, transformers and torchvision, which have
blocks and a class token, is in `families/`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..errors import InputError, ModelError
from .images import ordinary
from .multihead import OpenMultihead
from .plain import TOKEN_WISE, all_modules_are_hooked, is_hooked, runs_code_of
from .surgery import (
    STATISTICS,
    ClassTokenBlock,
    MixedStatistics,
    MovingStatistics,
    OffsetNorm,
    OpenAttention,
    PromptedBlock,
    TracedAttention,
    capture,
    selecting,
)
from .trace import Trace, logits_of, title, trace, weight_of, width_of

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
GROUP_NORMS = (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
LAYER_NORMS = (nn.LayerNorm, nn.RMSNorm)
OTHER_LAYER_NORM = re.compile("RMSNorm|SimpleNorm", re.IGNORECASE)  # the names of these norms in timm and transformers

PARTS = {
    "norms": "normalisation layers with weights",
    "batch norms": "BatchNorm layers with the statistics of the source data",
    "features": "a linear head, whose input are the features",
    "blocks": "the blocks of a vision transformer",
    "attention": "self-attention over all tokens of an image",
    "class token": "a class token",
}


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
        return norms_in(self.module)

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
class TracedBlock:
    """A block of which a trace has found the attention, and nothing else is known."""

    attention: nn.Module
    heads: int
    opened: OpenAttention | None = None

    def open(self) -> OpenAttention:
        """Return the attention as an `OpenAttention`. If it is already open, return it as it is."""
        opens = OpenMultihead if isinstance(self.attention, nn.MultiheadAttention) else TracedAttention
        self.opened = self.opened or opens(self.attention, self.heads)
        return self.opened

    def close(self) -> None:
        """Let the attention run as it is again."""
        if self.opened is not None:
            self.opened.close()
            self.opened = None


@dataclass
class ModelView:
    """A model: its parts, and functions that run it.

    The fields from `blocks` on describe a vision transformer with a class token. Other models have the default values.
    """

    model: nn.Module
    family: str
    channels: int
    image_size: tuple[int, int] | None  # None: any size that the model accepts
    _head: nn.Linear | None  # or another layer with `in_features` and `out_features`; None if the trace has to find it
    blocks: list[Block] = field(default_factory=list)
    width: int = 0
    tokens: int = 0  # for an image of the default size, including the class token
    class_token_suffices: bool = False  # whether the last block can be computed for this token only
    plain: frozenset[type] = frozenset()  # the classes of a plain last block and of what is around it
    after: tuple[str, ...] = ()  # the names of the modules that get all tokens after the last block
    _blocks: nn.Module = field(default_factory=nn.Module)  # the module that contains the blocks
    prefix: int = 1  # number of tokens before the patches: the class token and registers
    _trace: Trace | None = None  # of a model whose head is not known otherwise
    _read: bool = False  # whether other tokens of the last block are read than the head reads
    _own_head: nn.Linear | None = None  # the model's own head, while another one replaces it
    _set_aside: list[tuple[dict[Any, Any], Any, Any]] = field(default_factory=list)  # inserted parts: place, name, part
    _traced: list[TracedBlock] = field(default_factory=list)
    _tracking: dict[Any, bool] = field(default_factory=dict)  # flags of the BatchNorm layers that use batch statistics

    def look_at_pass(self) -> None:
        """Find what is not known by a pass of random images: the channels, the classes, and the head if there is one."""
        self._trace = seen = trace(self.model)
        self.channels = seen.channels
        self._head = seen.heads[0][0] if len(seen.heads) == 1 else None  # type: ignore[assignment]
        if not self.blocks and len(seen.attentions) == len(self.stages):
            self._traced = [TracedBlock(attention.module, attention.heads) for attention in seen.attentions]
            self.width, self.tokens = seen.attentions[0].width, seen.attentions[0].tokens
            self.prefix = self.tokens - math.isqrt(self.tokens) ** 2  # those beside a square of patches

    @property
    def parts(self) -> list[str]:
        """The names of the parts that the model has, of `PARTS`."""
        has = {
            "norms": any(True for norm in self.norms for _ in _own_parameters(norm)),
            "batch norms": bool(self.batch_norms),
            "features": bool(self.heads),
            "blocks": bool(self.blocks),
            "attention": bool(self.attentions),
            "class token": bool(self.blocks) or (self._trace is not None and self._trace.class_token),
        }
        return [part for part in PARTS if has[part]]

    @property
    def head(self) -> nn.Linear:
        """The linear layer that returns the logits. It may be another layer with such a shape."""
        require_supported(self.model, self._head is not None, "no single linear layer of it returns the logits")
        assert self._head is not None
        return self._head

    @property
    def heads(self) -> list[tuple[nn.Module, float]]:
        """The linear layers whose outputs, times these factors, sum to the logits: in most models the head, and 1."""
        traced = () if self._trace is None else self._trace.heads
        if self._head is None or len(traced) > 1:
            return list(traced)
        return [(self._head, traced[0][1] if traced else 1.0)]

    def _require_head(self) -> None:
        require_supported(self.model, bool(self.heads), "no linear layer of it returns the logits")

    @property
    def norms(self) -> list[nn.Module]:
        """The normalisation layers of the model, in order."""
        return norms_in(self.model)

    @property
    def batch_norms(self) -> list[Any]:
        """The BatchNorm layers that hold the statistics of the source data."""
        return [norm for norm in self.norms if isinstance(norm, BATCH_NORMS) and norm.running_mean is not None]

    @property
    def kind_of_norm(self) -> str:
        """The most frequent kind of norm: "batch", "group" or "layer"."""
        counts = Counter(kind_of(norm) or "layer" for norm in self.norms)
        return counts.most_common(1)[0][0] if counts else "layer"

    @property
    def attentions(self) -> list[Block] | list[TracedBlock]:
        """The blocks of which the attention can be opened. Their norms are those of the stages of the same numbers."""
        return self.blocks or self._traced

    @property
    def stages(self) -> list[list[nn.Module]]:
        """The norms of each block, or, in a model without blocks, of each stage.

        The stages are the parts of the smallest module that contains all parts with several norms, or 80 % of the norms,
        such as the four layers of a ResNet. Norms before the first stage are counted to it, and norms after the last one to
        that.
        """
        if self.blocks:
            return [block.norms for block in self.blocks]
        norms = self.norms
        trunk = self.model
        while True:
            children = list(trunk.children())
            most = [child for child in children if len(norms_in(child)) > 0.8 * len(norms)]
            large = most or [child for child in children if len(norms_in(child)) > 1]
            if len(large) != 1:
                break
            trunk = large[0]
        stages = [norms_in(child) for child in children if norms_in(child) and not is_norm(child)]
        if len(stages) < 2:
            return [norms]
        starts = [0, *(norms.index(stage[0]) for stage in stages[1:]), len(norms)]
        return [norms[a:b] for a, b in zip(starts, starts[1:])]

    @property
    def classes(self) -> int:
        """The number of classes of the head."""
        return self.head.out_features if self._trace is None else self._trace.classes

    @property
    def feature_width(self) -> int:
        """The number of features that enter the head, or all heads."""
        return sum(width_of(layer) for layer, _ in self.heads)

    @property
    def work(self) -> int:
        """A measure of the activations of one image, for the size of micro-batches: tokens times width of a ViT."""
        return self.tokens * self.width if self._trace is None else self._trace.work

    @property
    def usual_size(self) -> tuple[int, int] | None:
        """The size of images that the model certainly takes, or None if it is not known."""
        return self.image_size or (None if self._trace is None else self._trace.size)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self._weight.dtype

    @property
    def _weight(self) -> Tensor:
        """The first parameter of the head, or of the model if the head has none, as a quantised one."""
        return weight_of(*([] if self._head is None else [self._head]), self.model)

    @property
    def precise(self) -> torch.dtype:
        """The type of what is remembered of the outputs: that of the weights, and at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def package(self) -> str:
        """The name of the library that the model comes from."""
        return {"hf": "transformers"}.get(self.family, self.family)

    @property
    def version(self) -> dict[str, str]:
        """The version of the library that the model comes from, by the name of the library."""
        try:
            return {self.package: metadata.version(self.package)}
        except metadata.PackageNotFoundError:  # a user's own module
            return {}

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits of a batch, (batch, classes)."""
        try:
            return logits_of(self.model(images))
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise InputError(
                f"{len(images)} images of this size are too few for the statistics of a BatchNorm: pass more images at "
                "once, or choose a method that keeps the statistics of the source (norm, source, t3a)."
            ) from error

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
        layers = [layer for layer, _ in self.heads]
        holders = [module for module in self.model.modules() if any(child in layers for child in module.children())]
        if all(runs_code_of(m, self.plain) and not is_hooked(m) for m in (self.model, *holders, *layers)):
            return
        images = torch.rand(2, self.channels, *(self.usual_size or (224, 224)), generator=torch.Generator().manual_seed(0))
        features, logits = self.features(images.to(self.device, self.dtype))
        require_supported(
            self.model,
            _is_close(self.classify(features), logits),
            "it changes the logits after its head, and this method calls the head alone. Make the change inside of the "
            "head, or choose another method",
        )

    @torch.no_grad()
    def head_weight(self) -> Tensor:
        """Return the weight that acts in the head, (classes, width of the features).

        Raises:
            ModelError: If there is no head, or it is not a linear function of the features.
        """
        self._require_head()
        heads: list[tuple[Any, float]] = self.heads
        if all(runs_code_of(layer, TOKEN_WISE) and not is_hooked(layer) for layer, _ in heads):
            weights = [layer.weight if factor == 1 else factor * layer.weight for layer, factor in heads]
            return weights[0] if len(weights) == 1 else torch.cat(weights, dim=1)
        unit = torch.eye(self.feature_width, dtype=self.dtype, device=self.device)
        bias = self.classify(torch.zeros_like(unit[:1]))
        weight = (self.classify(unit) - bias).T
        other = torch.rand(1, len(unit), generator=torch.Generator().manual_seed(0)).to(unit)
        require_supported(
            self.model,
            _is_close(other @ weight.T + bias, self.classify(other)),
            f"its head, a {type(heads[0][0]).__name__}, is not a linear function of the features, so that it has no row for "
            "each class. Put a torch.nn.Linear there, or choose another method",
        )
        return weight

    def classify(self, features: Tensor) -> Tensor:
        """Return the output of the head for features, (batch, width)."""
        parts = features.split([width_of(layer) for layer, _ in self.heads], dim=1)
        first, *others = (_output(layer, part, factor) for (layer, factor), part in zip(self.heads, parts))
        return sum(others, first)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features that enter the head, (batch, width), and the logits."""
        with self.capture_features() as seen:
            logits = self.logits(images)
        return seen(), logits

    @contextmanager
    def capture_features(self, *, first: bool = False) -> Iterator[Callable[[], Tensor]]:
        """Let the block pass images, and return a function that returns the features of the latest, or the first ones.

        Features of several heads are concatenated.
        """
        self._require_head()
        layers = [layer for layer, _ in self.heads]
        with capture(layers, first=first) as seen:
            yield lambda: torch.cat([seen[layer].inputs.flatten(1) for layer in layers], dim=1)

    def class_tokens(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class tokens after all blocks, concatenated, and the logits.

        After a block, the class token is taken as the first norm of the next block returns it. After the last block, it is
        what enters the head.
        """
        norms = [block.norm1 for block in self.blocks[1:]]
        with capture(norms) as seen, self.capture_features() as features:
            logits = self.logits(images)
        tokens = [seen[norm].outputs[:, 0] for norm in norms]
        return torch.cat([*tokens, features()], dim=1), logits

    @property
    def class_tokens_width(self) -> int:
        """The length of the concatenated class tokens of one image."""
        return (len(self.blocks) - 1) * self.width + self.feature_width

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
        self._head = head

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

    @contextmanager
    def unadapted(self) -> Iterator[None]:
        """Let the model run without what was inserted into it, and with the statistics of the source, inside the block."""
        inserted: list[tuple[dict[Any, Any], Any, Any, Any]] = []  # place, name, inserted part, original part
        if self._own_head is not None:
            inserted.append((vars(self), "_head", self.head, self._own_head))
        for name, layer, block in zip(self._blocks._modules, self.layers, self.blocks):
            inserted.append((self._blocks._modules, name, layer, block.module))
            if isinstance(block.attention, OpenAttention):
                own = block.module._modules
                inserted.append((own, block.attention_name, block.attention, block.attention.inner))
                if block.attention.extra is not None:
                    forward = vars(block.attention.inner)
                    inserted.append((forward, "forward", forward["forward"], None))
        for attention in (block.opened for block in self._traced if block.opened is not None and block.opened.extra):
            forward = vars(attention.inner)
            inserted.append((forward, "forward", forward["forward"], attention.forward_of_instance))
        for norm, tracked in self._tracking.items():
            inserted.append((vars(norm), "training", True, False))
            inserted.append((vars(norm), "track_running_stats", False, tracked))
        for module in self.model.modules():
            hooks: Any = module._forward_pre_hooks
            inserted += [(hooks, key, hook, None) for key, hook in hooks.items() if isinstance(hook, STATISTICS)]
            for name, child in module.named_children():
                if isinstance(child, OffsetNorm):
                    inserted.append((module._modules, name, child, child.inner))
                elif self._own_head is not None and child is self.head:
                    inserted.append((module._modules, name, child, self._own_head))
        self._set_aside = [(place, name, part) for place, name, part, _ in inserted]
        try:
            for place, name, _, original in inserted:
                if original is None:
                    del place[name]
                else:
                    place[name] = original
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Insert the modules again that `unadapted` has removed. This can be interrupted and repeated."""
        for place, name, part in self._set_aside:
            place[name] = part
        self._set_aside = []

    def use_batch_statistics(self) -> None:
        """Let every BatchNorm normalise with the statistics of the batch. Those of the source data do not change."""
        self._tracking |= {norm: norm.track_running_stats for norm in self.batch_norms}
        for norm in self._tracking:
            norm.training, norm.track_running_stats = True, False

    def mix_statistics(self, prior: float, images: int | None = None) -> None:
        """Let every BatchNorm normalise with a mixture of the statistics of source and batch, as `MixedStatistics`."""
        for norm in self.batch_norms:
            norm.register_forward_pre_hook(MixedStatistics(prior, images))

    def move_statistics(self, rate: float) -> nn.ModuleList:
        """Let every BatchNorm normalise with statistics that can follow batches, and return these statistics."""
        moving = nn.ModuleList(MovingStatistics(norm, rate) for norm in self.batch_norms)
        for norm, statistics in zip(self.batch_norms, moving):
            norm.register_forward_pre_hook(statistics)
        return moving

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
        libraries = {"torch", "acclimate", self.package}
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
        for traced in self._traced:
            traced.close()
        for module in list(self.model.modules()):
            if isinstance(module, OffsetNorm):
                self._exchange(module, module.inner)
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, STATISTICS)]:
                del hooks[key]
        for norm, tracked in self._tracking.items():
            norm.training, norm.track_running_stats = False, tracked
        self._tracking.clear()

    def _put(self, i: int, module: nn.Module) -> None:
        self._blocks._modules[list(self._blocks._modules)[i]] = module


def kind_of(module: nn.Module) -> str | None:
    """Return the kind of a norm, "batch", "group" or "layer", and None for any other module."""
    for kind, classes in (("batch", BATCH_NORMS), ("group", GROUP_NORMS), ("layer", LAYER_NORMS)):
        if isinstance(module, classes):
            return kind
    return "layer" if OTHER_LAYER_NORM.search(type(module).__name__) else None


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer."""
    return kind_of(module) is not None


def norms_in(module: nn.Module) -> list[nn.Module]:
    """Return the normalisation layers of a module, in order."""
    return [each for each in module.modules() if is_norm(each)]


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


def _output(layer: Any, features: Tensor, factor: float) -> Tensor:
    """Return the output of a linear layer, times a factor. A convolution gets the features as a single pixel."""
    out = layer(features[..., None, None]).flatten(1) if isinstance(layer, nn.Conv2d) else layer(features)
    return out if factor == 1 else factor * out


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are equal but for rounding in the type that they have."""
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def samples_interact(model: nn.Module) -> bool:
    """Return whether the output of a sample depends on its batch.

    That is so with BatchNorm on batch statistics, and with quantised layers, which choose a range for a whole batch.
    """
    return layer_without_gradient(model) is not None or any(
        isinstance(module, BATCH_NORMS)
        and (
            module.training
            or module.running_mean is None
            or any(isinstance(hook, STATISTICS) for hook in module._forward_pre_hooks.values())
        )
        for module in model.modules()
    )


def require_supported(model: nn.Module, condition: bool, what: str) -> None:
    """Raise a `ModelError` that says why a model cannot be adapted, unless the condition holds."""
    if not condition:
        raise ModelError(f"{title(model)} cannot be adapted: {what}.")
