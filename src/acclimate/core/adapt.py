"""The two functions that return an adapter: `adapt` wraps a source model, `load` continues from a state file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ConfigError, StateError
from ..models.families import view_of
from ..models.fingerprint import fingerprint
from . import statefile
from .adapter import Adapter, check_model
from .guard import Guard
from .method import Method
from .options import Options
from .ranks import Ranks, SingleProcess
from .registry import create_method, registered_method
from .statecheck import AllocationLimit, require_option_types, require_parts
from .statistics import SourceStatistics, empty_statistics
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
    recentre: bool | str | None = None,
    reply: str = "last",
    budget: str | float | None = None,
    group: ProcessGroup | None = None,
    **options: Any,
) -> Adapter:
    """Wrap an image classifier so that it adapts while it predicts.

    Args:
        model: Any module that takes images and returns logits. The method says which parts the model must have. A module of
            `torch.compile`, or a data-parallel one, adapts as the module inside of it, which is not compiled then
            (`compile=` compiles it).
        method: Name of a method (`acclimate.list_methods()` lists them), or a class.
        classes: Indices of the head's classes that exist in the target domain (or a boolean mask over them). The others are
            dropped before any softmax, and the logits have one column for each of these.
        predict: Whether the logits of a batch come from "before" its update, as in the papers' code, or from "after" it,
            which costs one more pass.
        guard: The guard, which compares the model with the unadapted one, and undoes harm. None turns it off. With
            `reference=True` it compares nothing and only skips steps that are not finite: the authors' code has no guard.
        micro_batch: Samples per pass; by default 32, on a CPU 2 for ViT-B and more for smaller models. It changes the
            cost, and the result by rounding only.
        precision: "float32", or autocast to "bfloat16" or "float16".
        compile: `torch.compile` the forward pass; a string names the backend.
        seed: The seed of all random numbers of the method.
        mean: The mean with which the images were normalised, as one number or one per channel. Methods that augment pixels
            need it. It may be left out for a timm model, whose `pretrained_cfg` contains it.
        std: The standard deviation with which the images were normalised, in the same form as `mean`.
        source_statistics: Statistics of the source data, or the file that they were saved to. EATA, CFA, FOA, POEM, ReCAP
            and ActMAD need statistics that `acclimate.source_statistics` computes; DePT-G needs prompts that `acclimate
            train-prompts` trains. Other methods ignore them.
        recentre: Whether to subtract the centre of the stream from the features before the head. This removes the
            displacement that a domain shift gives to all features. True selects "order", which takes the mean of the
            features if the order of the stream is random, and otherwise corrects it for the classes of the stream. The
            other forms are "mean" (as NEO) and "class" (always corrected). The head must be linear. By default the method
            decides; most do not recentre.
        reply: When a call returns: "last", at the end of its step, or "first", as soon as its logits are known. For most
            methods that is after one forward pass. The rest of the step then runs in a thread of the adapter, and the next
            call waits for it. The results are the same, bit for bit. An error of the rest is raised by the next call.
            `close` waits, and ends the thread. Hooks on the model are called in that thread.
        budget: The batches that are learned from with reply="first"; by default all of them. The others are only predicted,
            and `skipped` counts them. "realtime" skips the step of a call that had to wait for the step before it, and
            "20ms" that of a call that waited for more than 20 milliseconds. A number up to 1 is a share of the batches.
        group: A `torch.distributed` process group whose ranks adapt to one stream together. Every rank wraps an equal model,
            passes its share of each batch, which may be empty, and gets the logits of that share. The update is that of the
            whole batch, and the same on all ranks. Without a group, the ranks that torchrun starts share nothing, and each
            can adapt to its own stream. Call `init_process_group` first: before that call,
            `torch.distributed.group.WORLD` is None, which means no group.
        **options: The method's own options. The command `acclimate methods dct` explains those of DCT.

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
        shared = Options(classes, predict, guard, micro_batch, precision, compile, seed, mean, std, recentre, reply, budget)
        return Adapter(model, create_method(method, options), shared, statistics=statistics, ranks=ranks)


def _ranks(group: ProcessGroup | None, model: nn.Module) -> SingleProcess:
    return SingleProcess() if group is None else Ranks(group, model)


@torch.inference_mode(False)
def load(
    path: str | PathLike[str],
    model: nn.Module,
    *,
    compile: bool | str = False,
    reply: str = "last",
    budget: str | float | None = None,
    group: ProcessGroup | None = None,
) -> Adapter:
    """Wrap a fresh copy of the source model and continue from a state file as if the run had never stopped.

    Method, options and random state come from the file, except for `compile`, `reply` and `budget`. If the file is damaged,
    or belongs to another model, or holds what no run could have saved, a `StateError` is raised and `model` is not changed.
    A file runs no code: the method has to be known already, built in or registered. A file does not depend on how many ranks
    wrote it. If a process `group` is given, all its ranks load the same file and continue together; otherwise this process
    continues alone.
    """
    own = {"compile": compile, "reply": reply, "budget": budget}
    Options(**own)  # type: ignore[arg-type]  # refuses a wrong value as that of the caller, before one of the file
    ranks = _ranks(group, model)
    with ranks.together():
        require_unwrapped(model, "use its adapter's load(), or pass the plain source model.")
        adapter = resumed(path, *statefile.read(path), model, own, ranks)
        try:
            ranks.finish_load()
        except BaseException:
            adapter.unwrap()
            raise
        return adapter


def resumed(
    path: str | PathLike[str],
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    model: nn.Module,
    own: Mapping[str, Any],
    ranks: SingleProcess,
) -> Adapter:
    """Wrap a model, and continue from a state file that was already read.

    `path` is used in error messages, and `own` contains the options that a file does not decide.
    """
    view = view_of(model)
    mine = fingerprint(view, view.model.state_dict())
    check_model(path, header, view.model, mine)
    require_parts(path, header, method=str, config=dict, options=dict)
    source = header.get("source") or {}
    require_parts(path, {"source": source}, source=dict)
    try:
        kind = registered_method(header["method"])
    except ConfigError as error:
        advice = "A file runs no code: import the module that registers the method first."
        raise StateError(f"{path} was written with a method that is not known here. {error} {advice}") from error
    require_option_types(path, header["config"], kind.options())
    what = f"{path} was written with options that are not known here"
    try:
        with AllocationLimit(what, [*tensors.values(), *model.parameters()]):
            method = create_method(kind, header["config"])
            options = Options.from_header(header["options"], **own)
            # the file contains the constants that the method took from the source statistics
            needs = method.info.needs
            known = empty_statistics(needs, view, {"class": "", **mine}, source) if needs else None
            adapter = Adapter(model, method, options, statistics=known, ranks=ranks)
    except Exception as error:  # options that nobody has tried may raise anything
        if isinstance(error, StateError) or getattr(error, "agreed", False):
            raise
        raise StateError(f"{what}: {type(error).__name__}: {error}") from error
    adapter._fingerprint = mine  # avoids that a large model is hashed twice
    try:
        adapter.resume(path, tensors, header)
    except BaseException:
        adapter.unwrap()
        raise
    return adapter
