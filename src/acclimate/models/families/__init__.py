"""Families of vision transformers, and the view of any other model.

Each file of this folder shows the vision transformers of one library, with their blocks and their class token. A new file is
found without being registered anywhere. Of any other model, the view shows the norms, and the head and the features that a
pass of random images finds.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...errors import ModelError
from ..trace import width_of
from ..view import ModelView, require_supported


@dataclass(frozen=True)
class Sizes:
    """The sizes of the small models that the conformance suite uses."""

    image: int = 32
    patch: int = 8
    width: int = 32
    depth: int = 4
    heads: int = 2
    classes: int = 10


@dataclass(frozen=True)
class Family:
    """A family of models. The file of a family defines one instance with the name FAMILY.

    Args:
        name: The name of the family in results and messages.
        package: The name of the library, for its import and for its installation.
        view: A function that returns the structural view of a model, or None for a model of another family.
        tiny: A function that builds a small model of the family for the conformance suite.
    """

    name: str
    package: str
    view_of: Callable[[nn.Module], ModelView | None]
    tiny: Callable[[Sizes], nn.Module]


@cache
def families() -> dict[str, Family]:
    """Return all families by name."""
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {module.FAMILY.name: module.FAMILY for module in modules}


def linear(head: nn.Module) -> nn.Linear | None:
    """Return a head if it has the shape of a linear layer, and otherwise None: the trace may find one inside of it."""
    return head if width_of(head) else None  # type: ignore[return-value]


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside of `torch.compile`, `DataParallel` and `DistributedDataParallel`."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def view_of(model: nn.Module) -> ModelView:
    """Return the structural view of a model, or raise a `ModelError` that says why there is none."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"adapt() takes a torch.nn.Module, not {type(model).__name__}.")
    model = bare(model)
    require_supported(
        model,
        not any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()),
        "torch.jit has compiled it, so that its parts cannot be seen. Adapt the module that it was made from",
    )
    require_supported(
        model,
        not any(is_lazy(p) for p in model.parameters()),
        "its lazy layers have no weights yet. Pass a batch through it first",
    )
    require_supported(model, not any(p.is_inference() for p in model.parameters()), "it was built in inference mode")
    require_supported(
        model,
        getattr(model, "num_classes", None) != 0,
        "it has no head (num_classes=0). Give it one, or wrap it in a module that classifies its features",
    )
    library = type(model).__module__.partition(".")[0]
    found = _transformer(model) or ModelView(model, {"transformers": "hf"}.get(library, library), 0, None, None)
    if found._head is None:
        require_supported(
            model,
            not any(p.is_meta for p in model.parameters()),
            "its weights are on the meta device. Load them first (model.to_empty, load_state_dict)",
        )
        found.look_at_pass()
    require_supported(
        model, found.classes > 1, "its head has one output: adaptation by entropy needs logits of two classes or more"
    )
    return found


def _transformer(model: nn.Module) -> ModelView | None:
    """Return the view of a model that is a vision transformer of a family, or that contains one; otherwise None."""
    inside = []
    for name, module in model.named_modules():
        for family in families().values():
            try:
                found = family.view_of(module)
            except AttributeError:
                found = None  # a part was replaced by one that lacks something
            if found is not None and found.blocks:
                if module is model:
                    return found
                inside.append((found, name))
    return _inside(inside[0][0], model, inside[0][1]) if len(inside) == 1 else None


def _inside(inner: ModelView, model: nn.Module, name: str) -> ModelView:
    """Return the view of a model that contains a vision transformer, whose tokens the model may use in its own way."""
    blocks = [replace(block, path=f"{name}.{block.path}") for block in inner.blocks]
    unknown = replace(inner, class_token_suffices=False, plain=frozenset(), after=(), _head=None, image_size=None)
    return replace(unknown, model=model, blocks=blocks)
