"""Functions that load models by name and choose devices, for the bench and all commands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core import statefile
from ..core.statecheck import AllocationLimit, fitted, require_parts
from ..errors import ConfigError, ModelError, StateError, first_line, shorten_list, suggest
from .families import view_of
from .normalisation import model_normalisation, processor_normalisation

if TYPE_CHECKING:
    from ..core.statistics import SourceStatistics

BESIDE = "Weights of a timm model stand beside its name: weights=FILE, on the command line --model NAME --weights FILE."
SOURCE_MODEL = "source model"  # the kind of file that `acclimate train-source` writes


def pick_device(name: str | None = None) -> torch.device:
    """Return the named device, or by default a GPU if there is one and the CPU otherwise."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the device "meta" has tensors, but no numbers
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name!r} cannot be used: {first_line(error)}.") from None
    return device


@dataclass(frozen=True)
class SourceModel:
    """A source model, with its tuned options and its source statistics.

    Args:
        name: The name of the model in results.
        load: A function that returns the model.
        options: A function that returns options of methods, tuned for this model and for batches of a given size. With
            `tuned=False` it returns only the options that a method requires.
        statistics: A function that returns the source statistics of the model, of all kinds or of those that are needed.
    """

    name: str
    load: Callable[[], nn.Module]
    options: Callable[[int, bool], dict[str, dict[str, Any]]] = lambda batch_size, tuned: {}
    statistics: Callable[[Collection[str] | None], list[SourceStatistics]] = lambda needed: []


def _bundled() -> SourceModel:
    from ..data import bundled  # the bundled model is stored beside its images

    return SourceModel(bundled.NAME, bundled.model, bundled.options, bundled.source_statistics)


CATALOGUE: dict[str, Callable[[], SourceModel]] = {"bundled": _bundled}  # names that are neither in timm nor files


def source_model(name: str, *, weights: str | os.PathLike[str] | None = None) -> SourceModel:
    """Return a source model by name.

    Args:
        name: "bundled", the name of a timm model with the tag of its weights
            (`vit_base_patch16_224.augreg_in21k_ft_in1k`), a file that `acclimate train-source` wrote, or a folder or a name
            on the hub (`facebook/deit-base-patch16-224`) of a model that transformers saved.
        weights: A local file with the weights of a timm model (`.safetensors` or `.pth`), instead of a download. The head
            gets as many classes as the file has.
    """
    if name in CATALOGUE:
        if weights is not None:
            raise ConfigError(f"The model {name!r} has weights of its own: weights= goes with a name of timm's.")
        return CATALOGUE[name]()
    if name.endswith(".safetensors"):
        return SourceModel(name, lambda: load_source(name))
    if is_huggingface(name):
        if weights is not None:
            raise ConfigError(f"{name} has weights of its own: weights= goes with a name of timm's.")
        return SourceModel(name, lambda: load_huggingface(name))
    if Path(name).is_file():
        raise ConfigError(f"{name} is a file, and no name of a model. {BESIDE}")
    return SourceModel(name, lambda: create_timm(name, weights=weights).eval())


def load_model(name: str = "bundled", *, weights: str | os.PathLike[str] | None = None) -> nn.Module:
    """Return a model by name, ready to be wrapped. `source_model` explains which names there are."""
    return source_model(name, weights=weights).load()


def architecture(name: str) -> nn.Module:
    """Return a model by name, with random weights if it is one of timm's: what parts it has does not depend on them."""
    known = name in CATALOGUE or name.endswith(".safetensors") or is_huggingface(name)
    return load_model(name) if known else create_timm(name, pretrained=False).eval()


def is_huggingface(name: str) -> bool:
    """Return whether a name is that of a folder of a model of transformers, or of a model on the hub."""
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".") and not Path(name).exists()
    return Path(name, "config.json").is_file() or on_hub


def load_huggingface(name: str) -> nn.Module:
    """Return a model that transformers saved, from a folder or from the hub.

    The normalisation and the size of images of its image processor, if there is one, are in `pretrained_cfg`, where timm
    expects them.
    """
    try:
        from transformers import AutoImageProcessor, AutoModelForImageClassification
    except ImportError as error:
        raise ConfigError(f"{name} is a model of transformers: pip install transformers.") from error
    try:
        model: Any
        model, info = AutoModelForImageClassification.from_pretrained(name, output_loading_info=True)
    except Exception as error:  # transformers passes on any error of the network, the hub or the disk
        raise ModelError(
            f"{name} cannot be loaded as an image classifier of transformers ({type(error).__name__}: {first_line(error)})."
        ) from error
    made_up = sorted({*info["missing_keys"]} & {key for key, _ in model.named_parameters()})
    if made_up:
        raise ModelError(
            f"{name} has no weights for {shorten_list(made_up)} of a {type(model).__name__}, which would be random: train "
            "it as a classifier first, or make a classifier of a CLIP or SigLIP by acclimate.zero_shot."
        )
    try:
        processor: Any = AutoImageProcessor.from_pretrained(name)
        if hasattr(processor, "data_config"):  # of a model of timm in transformers
            model.pretrained_cfg = dict(processor.data_config)
            return model.eval()
        mean, std = processor_normalisation(processor)
    except Exception:  # there is none, or it normalises nothing: mean= and std= have to be given
        return model.eval()
    size = dict(getattr(processor, "crop_size", None) or getattr(processor, "size", None) or {})
    side = size.get("height") or size.get("shortest_edge")
    takes = {} if side is None else {"input_size": (len(mean), side, side)}
    model.pretrained_cfg = {"mean": tuple(mean), "std": tuple(std), **takes}
    return model.eval()


def load_source(path: str | os.PathLike[str]) -> nn.Module:
    """Return a model that `train_source` wrote.

    Its normalisation is in `pretrained_cfg`, where timm expects it.
    """
    from timm.data import resolve_model_data_config

    try:
        tensors, header = statefile.read_kind(path, SOURCE_MODEL)
    except StateError as error:
        raise StateError(f"{error} {BESIDE}") from None
    require_parts(path, header, settings=dict)
    told = header["settings"]
    require_parts(path, told, classes=list, model=str)
    try:
        names = tuple(told["classes"])
        with AllocationLimit("it is not a model of this size", tensors.values()):
            model: Any = create_timm(told["model"], pretrained=False, num_classes=len(names))
        model.load_state_dict(fitted("its weights are of another model", tensors, model.state_dict()))
        takes = {key: tuple(told[key]) for key in ("input_size", "mean", "std")} | {"crop_pct": told["crop_pct"]}
        model.pretrained_cfg = {**model.pretrained_cfg, **takes, "num_classes": len(names), "label_names": names}
        model.default_cfg = model.pretrained_cfg  # the older name in timm
        resolved = resolve_model_data_config(model)
        model_normalisation(view_of(model))  # refuses numbers that are none
        size = view_of(model).image_size or takes["input_size"][1:]  # a model may take images of any size
        if size != takes["input_size"][1:] or any(resolved[key] != takes[key] for key in takes):
            raise StateError(f"it reads {resolved} where {takes} is written.")
    except Exception as error:  # settings that nobody has tried may raise anything
        versions = f"timm {metadata.version('timm')}, and was made with {header.get('versions', {}).get('timm')}"
        raise StateError(f"{path} cannot be rebuilt by {versions}: {error}") from error
    return model.eval()


def create_timm(
    name: str, *, weights: str | os.PathLike[str] | None = None, pretrained: bool = True, num_classes: int | None = None
) -> nn.Module:
    """Return a timm model with its published weights, with those of a local file, or with random ones.

    Args:
        name: A name in `timm.list_models`.
        weights: A local file with weights. Its head is not used if the model gets a new head of another size.
        pretrained: Whether to load weights.
        num_classes: The number of classes of a new head. Default: the head of the weights.
    """
    import timm

    bare = name.partition(".")[0]
    if not timm.is_model(bare):
        raise ConfigError(f"timm has no model {name!r}.{suggest(bare, timm.list_models(), 0.5)}")
    tensors = None if weights is None else _read_weights(Path(weights))
    classes = num_classes if tensors is None or num_classes is not None else _classes_of(tensors, bare)
    head = {} if classes is None else {"num_classes": classes}
    try:
        model = timm.create_model(name, pretrained=pretrained and weights is None, **head)
    except Exception as error:  # timm passes on any error of the network, the hub or the disk
        if isinstance(error, RuntimeError) and "Invalid pretrained tag" in str(error):
            tags = ", ".join(timm.list_pretrained(f"{bare}.*"))
            raise ConfigError(f"timm has no weights {name!r} (there are: {tags}).") from None
        raise ModelError(
            f"The weights of {name} cannot be fetched ({type(error).__name__}: {first_line(error)}). Without a "
            "network give a local file: weights=FILE, on the command line --weights FILE."
        ) from error
    if tensors is not None:
        _fill(model, tensors, str(weights), classifiers(bare) if num_classes is not None else ())
    return model


def classifiers(name: str) -> tuple[str, ...]:
    """Return the names of the heads of a timm model."""
    import timm

    config = timm.get_pretrained_cfg(name)
    found = getattr(config, "classifier", None) or "head"
    return (found,) if isinstance(found, str) else tuple(found)


def _classes_of(tensors: Mapping[str, Any], name: str) -> int | None:
    """Return the number of classes of weights of a timm model, or None if their head has another name."""
    head = tensors.get(f"{classifiers(name)[0]}.weight")
    return None if head is None else len(head)


def _read_weights(file: Path) -> dict[str, Any]:
    """Return the weights in a file, without the name of a module that contains the whole model, as Lightning writes it."""
    from timm.models import load_state_dict

    try:
        found = load_state_dict(str(file), use_ema=False, weights_only=True)
    except Exception as error:
        raise ModelError(
            f"{file} cannot be read as weights ({type(error).__name__}: {first_line(error)}). Write one that can: "
            "torch.save(model.state_dict(), FILE)."
        ) from error
    outer = {key.partition(".")[0] for key in found}
    return {key.partition(".")[2]: value for key, value in found.items()} if len(outer) == 1 else found


def _fill(model: nn.Module, found: Mapping[str, Any], file: str, new: tuple[str, ...]) -> None:
    """Load weights, which must all fit, except for those of new heads, whose names are given."""
    mine = model.state_dict()
    head = {key for key in mine if key.startswith(tuple(f"{name}." for name in new))}
    other = {key for key in head if key not in found or found[key].shape != mine[key].shape}
    wrong = [key for key in mine if key not in other and (key not in found or found[key].shape != mine[key].shape)]
    wrong += [key for key in found if key not in mine]
    if wrong:
        raise ModelError(f"{file} is not of this model: {', '.join(wrong[:4])} missing, unknown or of another shape.")
    model.load_state_dict({**mine, **{key: value for key, value in found.items() if key not in other}})
