"""The two ways to get an adapter: wrap a source model, or continue from a state file."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import state
from .adapter import WRAPPED, Adapter, check_model
from .errors import ConfigError, ModelError, StateError
from .guard import Guard
from .method import Method, create
from .vit import fingerprint, view


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
        **options: The method's own options; `acclimate methods dct` on the command line explains them.

    Example:
        >>> model = acclimate.adapt(timm.create_model("vit_base_patch16_224.augreg_in21k_ft_in1k", pretrained=True), "dct")
        >>> for images in stream:
        ...     logits = model(images)
    """
    return Adapter(
        model,
        create(method, options),
        classes=classes,
        predict=predict,
        guard=guard,
        micro_batch=micro_batch,
        precision=precision,
        compile=compile,
        seed=seed,
    )


@torch.inference_mode(False)
def load(path: str | PathLike[str], model: nn.Module) -> Adapter:
    """Wrap a fresh copy of the source model and continue from a state file as if the run had never stopped.

    Method, options and random state come from the file. If the file is damaged, or of another model, a `StateError` says so
    and `model` is as before.
    """
    tensors, header = state.read(path)
    if isinstance(model, Adapter) or model in WRAPPED:
        raise ModelError("This model is wrapped already; use its adapter's load(), or pass the plain source model.")
    mine = fingerprint(view(model), model.state_dict())
    check_model(path, header, model, mine)
    try:
        options = {**header["options"], **header["config"]}
        if options["guard"] is not None:
            options["guard"] = Guard(**options["guard"])
        adapter = adapt(model, header["method"], **options)
    except (ConfigError, KeyError, TypeError) as error:
        raise StateError(f"{path} was written with a method or options that are not known here: {error}") from error
    adapter._fingerprint = mine  # hashing a large model once is enough
    try:
        adapter.resume(path, tensors, header)
    except BaseException:
        adapter.unwrap()
        raise
    return adapter
