"""The two ways to get an adapter: wrap a source model, or continue from a state file."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigError, StateError
from ..models.families import view
from ..models.fingerprint import fingerprint
from . import statefile
from .adapter import Adapter, check_model
from .guard import Guard
from .method import Method
from .options import Options
from .ranks import Alone, Ranks
from .registry import create
from .statistics import SourceStatistics, blank
from .wrapping import require_unwrapped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.inference_mode(False)
def adapt(
    model: nn.Module,
    method: str | type[Method] = "dct",
    *,
    classes: Sequence[int] | Tensor | None = None,
    predict: str = "before",
    guard: Guard | Literal["default"] | None = "default",
    micro_batch: int | None = None,
    precision: str = "float32",
    compile: bool | str = False,
    seed: int = 0,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    source_statistics: SourceStatistics | str | PathLike[str] | None = None,
    group: ProcessGroup | None = None,
    **options: Any,
) -> Adapter:
    """Wrap a vision transformer so that it adapts while it predicts.

    Args:
        model: A timm `VisionTransformer`, transformers `ViTForImageClassification` or torchvision `VisionTransformer`.
        method: Name of a method (`acclimate.list_methods()` lists them), or a class.
        classes: Indices of the head's classes that exist in the target domain (or a boolean mask over them). The others are
            dropped before any softmax, and the logits have one column for each of these.
        predict: Logits from "before" this batch's update, as the papers' code scores them, or "after" it (one more pass).
        guard: Watches for collapse; None turns it off.
        micro_batch: Samples per pass; by default 32, on a CPU 2 for ViT-B and more for smaller models. It changes the
            cost, and the result by rounding only.
        precision: "float32", or autocast to "bfloat16" or "float16".
        compile: `torch.compile` the forward pass; a string names the backend.
        seed: Of everything random in the method.
        mean: How the images are normalised, for methods that augment pixels: one number, or one per channel. A timm model
            with a `pretrained_cfg` says it itself; any other model needs it there. So `std`.
        std: See `mean`.
        source_statistics: Statistics of the source data, or the file that they were saved to, for methods that need some
            (EATA, CFA, FOA): see `acclimate.source_statistics`; or prompts that were trained on it (DePT-G): see
            `acclimate train-prompts`. Other methods leave them alone.
        group: A `torch.distributed` process group whose ranks adapt to one stream together. Every rank wraps an equal model
            and passes its share of each batch, which may be empty, and gets the logits of that share; the update is that of
            the whole batch, and the same on all ranks. Only what is given here is shared, never what torchrun has started:
            its ranks may as well each adapt to a stream of their own. Call `init_process_group` first: before it,
            `torch.distributed.group.WORLD` is None, which means no group.
        **options: The method's own options; `acclimate methods dct` on the command line explains them.

    Example:
        >>> model = acclimate.adapt(timm.create_model("vit_base_patch16_224.augreg_in21k_ft_in1k", pretrained=True), "dct")
        >>> for images in stream:
        ...     logits = model(images)

        On several GPUs, started by torchrun:

        >>> torch.distributed.init_process_group("nccl")
        >>> model = acclimate.adapt(vit, "dct", group=torch.distributed.group.WORLD)
        >>> for images in stream:
        ...     logits = model(images.tensor_split(torch.distributed.get_world_size())[torch.distributed.get_rank()])
    """
    ranks = _ranks(group, model)
    with ranks.together():
        statistics = None if source_statistics is None else SourceStatistics.opened(source_statistics)
        shared = Options(classes, predict, guard, micro_batch, precision, compile, seed, mean, std)
        return Adapter(model, create(method, options), shared, statistics=statistics, ranks=ranks)


def _ranks(group: ProcessGroup | None, model: nn.Module) -> Alone:
    return Alone() if group is None else Ranks(group, model)


@torch.inference_mode(False)
def load(path: str | PathLike[str], model: nn.Module, *, group: ProcessGroup | None = None) -> Adapter:
    """Wrap a fresh copy of the source model and continue from a state file as if the run had never stopped.

    Method, options and random state come from the file. If the file is damaged, or of another model, a `StateError` says so
    and `model` is as before. A file does not say how many ranks wrote it: with a `group` (see `adapt`) all its ranks load
    the same file and go on together, without one this process goes on alone.
    """
    ranks = _ranks(group, model)
    with ranks.together():
        adapter = _load(path, model, group)
        try:
            ranks.finish_load()
        except BaseException:
            adapter.unwrap()
            raise
        return adapter


def _load(path: str | PathLike[str], model: nn.Module, group: ProcessGroup | None) -> Adapter:
    tensors, header = statefile.read(path)
    require_unwrapped(model, "use its adapter's load(), or pass the plain source model.")
    mine = fingerprint(view(model), model.state_dict())
    check_model(path, header, model, mine)
    try:
        options = {**header["options"], **header["config"]}
        if options["guard"] is not None:
            options["guard"] = Guard(**options["guard"])
        needs = create(header["method"], header["config"]).info.needs
        # what the method keeps of the source statistics is in the file
        known = blank(needs, view(model), {"class": "", **mine}, header.get("source") or {}) if needs else None
        adapter = adapt(model, header["method"], source_statistics=known, group=group, **options)
    except (ConfigError, KeyError, TypeError) as error:
        raise StateError(f"{path} was written with a method or options that are not known here: {error}") from error
    adapter._fingerprint = mine  # hashing a large model once is enough
    try:
        adapter.resume(path, tensors, header)
    except BaseException:
        adapter.unwrap()
        raise
    return adapter
