"""Families of models. Each file of this folder shows the models of one library as a `ViT`.

A new file in this folder is found without being registered anywhere.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from torch import nn

from ...errors import ModelError
from ..view import ViT, require_supported, title


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
    view: Callable[[nn.Module], ViT | None]
    tiny: Callable[[Sizes], nn.Module]


@cache
def families() -> dict[str, Family]:
    """Return all families by name."""
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {module.FAMILY.name: module.FAMILY for module in modules}


def view(model: nn.Module) -> ViT:
    """Return the structural view of a model, or raise a `ModelError` that says why there is none."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"adapt() takes a torch.nn.Module, not {type(model).__name__}.")
    for family in families().values():
        try:
            found = family.view(model)
        except AttributeError as error:
            raise ModelError(
                f"{title(model)} cannot be adapted: one of its parts was replaced by one that lacks something ({error})."
            ) from error
        if found is not None:
            require_supported(model, len(found.blocks) > 0, "it has no transformer blocks")
            sizes = (getattr(found.head, name, None) for name in ("in_features", "out_features"))
            linear = all(isinstance(size, int) for size in sizes)
            require_supported(model, linear, "its head is not a linear layer (num_classes=0?)")
            require_supported(
                model,
                found.classes > 1,
                "its head has one output: adaptation by entropy needs logits of two classes or more",
            )
            require_supported(model, not any(p.is_inference() for p in model.parameters()), "it was built in inference mode")
            return found
    for name, module in model.named_modules():
        if name and any(family.view(module) is not None for family in families().values()):
            raise ModelError(f"{title(model)} contains a {title(module)} as its {name}: pass that one to adapt().")
    raise ModelError(
        f"{title(model)} is not a vision transformer that acclimate understands: no class token and blocks with "
        "self-attention were found. Supported: timm VisionTransformer (ViT, DeiT), transformers "
        "ViTForImageClassification, torchvision VisionTransformer."
    )
