"""A model by name, on a device: the one place where the bench and the commands get theirs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from ..errors import ConfigError, ModelError, nearest

BUNDLED = "bundled"


def pick_device(name: str | None = None) -> torch.device:
    """The named device, or by default a GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name!r} cannot be used: {str(error).splitlines()[0]}.") from None
    return device


def load_model(name: str = BUNDLED, *, weights: str | os.PathLike[str] | None = None) -> nn.Module:
    """A vision transformer, ready to be wrapped.

    Args:
        name: "bundled", a name of timm's with the tag of its weights (`vit_base_patch16_224.augreg_in21k_ft_in1k`), or a
            file that `acclimate train-source` wrote.
        weights: A local file with the weights of a timm model (`.safetensors` or `.pth`), instead of a download.
    """
    if name == BUNDLED:
        if weights is not None:
            raise ConfigError("The bundled model has weights of its own: weights= goes with a name of timm's.")
        from ..data import bundled

        return bundled.model()
    if name.endswith(".safetensors"):
        from ..training.source_model import load_source

        return load_source(name)
    return create_timm(name, weights=weights).eval()


def create_timm(
    name: str, *, weights: str | os.PathLike[str] | None = None, pretrained: bool = True, num_classes: int | None = None
) -> nn.Module:
    """A model of timm's, with its published weights, with those of a local file, or with none.

    Args:
        name: As in `timm.list_models`.
        weights: A local file. Its head is left out where there is to be a new one of another size.
        pretrained: Load weights at all.
        num_classes: Of a new head; by default that of the weights.
    """
    import timm

    bare = name.partition(".")[0]
    if not timm.is_model(bare):
        raise ConfigError(f"timm has no model {name!r}.{nearest(bare, timm.list_models('*vit*'), 0.5)}")
    head = {} if num_classes is None else {"num_classes": num_classes}
    try:
        model = timm.create_model(name, pretrained=pretrained and weights is None, **head)
    except Exception as error:  # of the network, the hub, the disk: timm passes on whatever it meets
        if isinstance(error, RuntimeError) and "Invalid pretrained tag" in str(error):
            tags = ", ".join(timm.list_pretrained(f"{bare}.*"))
            raise ConfigError(f"timm has no weights {name!r} (there are: {tags}).") from None
        raise ModelError(
            f"The weights of {name} cannot be fetched ({type(error).__name__}: {error}). Without a "
            "network give a local file: weights=FILE, on the command line --weights FILE."
        ) from error
    if weights is not None:
        _fill(model, Path(weights), new_head=num_classes is not None)
    return model


def _fill(model: nn.Module, file: Path, *, new_head: bool) -> None:
    """Load weights, all of which must fit, but for the head where a new one is wanted."""
    from timm.models import load_state_dict

    try:
        found = load_state_dict(str(file), use_ema=False, weights_only=True)
    except Exception as error:
        raise ModelError(f"{file} cannot be read as weights ({type(error).__name__}: {error}).") from error
    mine = model.state_dict()
    head = {key for key in mine if key.startswith("head.")} if new_head else set()
    other = {key for key in head if key not in found or found[key].shape != mine[key].shape}
    wrong = [key for key in mine if key not in other and (key not in found or found[key].shape != mine[key].shape)]
    wrong += [key for key in found if key not in mine]
    if wrong:
        raise ModelError(f"{file} is not of this model: {', '.join(wrong[:4])} missing, unknown or of another shape.")
    model.load_state_dict({**mine, **{key: value for key, value in found.items() if key not in other}})
