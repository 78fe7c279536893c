"""A source model for data that has none: a timm ViT with a new head, fine-tuned on one domain.

    data = open_data("office-home", root, Preprocess.for_model(timm.create_model(name)), domains=["Art"])
    train_source(data.domains[0], data.class_names, "art.safetensors", model=name)
    model = load_source("art.safetensors")

The recipe is ours. The paper says no more of Office-Home than that the classifier head is replaced and the model fine-tuned,
so the accuracy of a model from here is not that of its Source row. As the ViT's authors fine-tune (Dosovitskiy et al. 2021)
all weights are trained by SGD with momentum, from a head of zeros, along a cosine, gradients clipped at norm 1, without
weight decay. Warm-up, smoothed labels, a slower backbone, crops and flips are added. None of it was tuned.

A tenth of every class is held out. It is scored after each epoch and decides nothing: the weights are those at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from ..core import statefile
from ..core.files import file_digest
from ..data.domains import Domain
from ..data.folder import AnyPath
from ..data.preprocess import input_of
from ..errors import ConfigError, InputError, require_between, require_whole
from ..models.families import view
from ..models.loading import SOURCE_MODEL, create_timm, pick_device
from .loop import Training, augmented, checkpoint_of, deterministic, pace, read_trained, split, versions_used

MODEL = "vit_base_patch16_224.augreg_in21k_ft_in1k"
VERSION = 1  # of the recipe: what the numbers in `Recipe` do not say
UNFINISHED = f"unfinished {SOURCE_MODEL}"  # a kind of files


@dataclass(frozen=True)
class Recipe:
    """How to fine-tune.

    Args:
        epochs: Passes over the images. 20 are 700 to 1260 steps for the domains of Office-Home, short for a training but
            enough for a backbone that is trained already; fewer images need more.
        batch_size: Images in a step.
        head_lr: The highest learning rate of the new head, at the end of the warm-up.
        backbone_lr: The same of all the rest.
        momentum: Of SGD.
        warmup: Share of all steps in which the learning rates rise; then they fall to zero along a cosine.
        smoothing: Share of a label's weight that is spread over all classes.
        clip: The largest norm of the gradient.
        area: The smallest share of an image that a random crop keeps. Crops are scaled to full size, half of them flipped.
        stretch: The largest ratio of a crop's sides.
        held_out: Share of every class that is not trained on; at least one image.
    """

    epochs: int = 20
    batch_size: int = 64
    head_lr: float = 0.01
    backbone_lr: float = 0.001
    momentum: float = 0.9
    warmup: float = 0.05
    smoothing: float = 0.1
    clip: float = 1.0
    area: float = 0.5
    stretch: float = 4 / 3
    held_out: float = 0.1

    def __post_init__(self) -> None:
        require_whole(1, epochs=self.epochs, batch_size=self.batch_size)
        require_between(0, math.inf, head_lr=self.head_lr, backbone_lr=self.backbone_lr, clip=self.clip)
        require_between(0, 1, momentum=self.momentum, warmup=self.warmup, smoothing=self.smoothing, area=self.area)
        require_between(1, 4, stretch=self.stretch)
        require_between(0, 0.5, held_out=self.held_out)


class Trained(NamedTuple):
    """A finished source model."""

    accuracy: float
    held_out: int  # images on which it is measured
    found: bool  # whether it was finished before


def train_source(
    domain: Domain,
    class_names: Sequence[str],
    out: AnyPath,
    *,
    model: str = MODEL,
    weights: AnyPath | None = None,
    pretrained: bool = True,
    recipe: Recipe | None = None,
    seed: int = 0,
    device: str | None = None,
    autocast: bool = False,
    workers: int = 0,
    fresh: bool = False,
    console: Console | None = None,
) -> Trained:
    """Fine-tune a timm ViT on a domain, or go on with it, and write it to a file. What is finished is not trained again.

    Args:
        domain: Images, normalised as the model expects them.
        class_names: By label.
        out: The file, `*.safetensors`. Until it is finished, a checkpoint is beside it: `*.safetensors.unfinished`.
        model: Name in timm, with the tag of its weights.
        weights: A local file with weights to start from, instead of a download. Its head is not used.
        pretrained: Start from trained weights, not from random ones.
        recipe: How to train.
        seed: Of the images that are held out, their order, the crops, and random weights.
        device: Default: a GPU if there is one.
        autocast: Compute in bfloat16 where torch thinks it safe: faster on a GPU, other weights.
        workers: Processes that load images ahead; 0 loads in this one.
        fresh: Train again, even if it is finished or begun.
        console: Where progress is shown: a bar on a terminal, elsewhere a line for each epoch.
    """
    recipe, console, out = recipe or Recipe(), console or Console(quiet=True), Path(out)
    unfinished = checkpoint_of(out)
    require_whole(0, seed=seed, workers=workers)
    if weights is not None and not pretrained:
        raise ConfigError("weights= are to start from, and pretrained=False is to start from none: leave out one of them.")
    where = pick_device(device)
    train, held_out = split(domain, class_names, recipe.held_out, seed)
    with deterministic(where):
        torch.manual_seed(seed)
        net = create_timm(model, pretrained=False, num_classes=len(class_names))
        start = "timm's" if pretrained else "random"
        settings = {
            **_identity(net, domain, class_names),
            "weights": start if weights is None else _weights_digest(weights),
            "recipe": {"by": "acclimate", "version": VERSION, **asdict(recipe)},
            "seed": seed,
            "autocast": autocast,
        }
        finished = read_trained(out, SOURCE_MODEL, None if fresh else settings)
        if finished is not None and not fresh:
            unfinished.unlink(missing_ok=True)
            return Trained(finished[1]["accuracy"], finished[1]["held_out"], found=True)

        begun = None if fresh else read_trained(unfinished, UNFINISHED, settings)
        if begun is None and pretrained:
            net = create_timm(model, weights=weights, num_classes=len(class_names))
        run = _FineTuning(net.to(where), recipe, seed, autocast)
        run.carry_out(begun, out, settings, UNFINISHED, (train, held_out), workers, console)
    outcome = Trained(run.history[-1][1], len(held_out.labels), found=False)
    header = {"kind": SOURCE_MODEL, "settings": settings, "history": run.history, "num_classes": len(class_names)}
    made = {"versions": versions_used(), "device": str(where), "threads": torch.get_num_threads()}
    statefile.write(out, net.state_dict(), {**header, **made, "accuracy": outcome.accuracy, "held_out": outcome.held_out})
    unfinished.unlink(missing_ok=True)
    return outcome


class _FineTuning(Training):
    """Of all weights, from a head of zeros."""

    def __init__(self, model: nn.Module, recipe: Recipe, seed: int, autocast: bool) -> None:
        self.model, self.recipe, vit = model, recipe, view(model)
        head = list(vit.head.parameters())
        for parameter in head:
            nn.init.zeros_(parameter)
        rest = [p for p in model.parameters() if all(p is not other for other in head)]
        groups = [{"params": head, "peak": recipe.head_lr}, {"params": rest, "peak": recipe.backbone_lr}]
        super().__init__(vit, model, torch.optim.SGD(groups, lr=0.0, momentum=recipe.momentum), recipe, seed, autocast)

    def step(self, images: Tensor, labels: Tensor, draws: np.random.RandomState, done: float) -> float:
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * pace(done, self.recipe.warmup)
        shown = augmented(self.vit.check(images), draws, self.recipe.area, self.recipe.stretch)
        loss = F.cross_entropy(self.logits(shown), labels.to(shown.device), label_smoothing=self.recipe.smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.require_finite(norm)
        self.optimizer.step()
        return loss.item()


def _identity(model: Any, domain: Domain, class_names: Sequence[str]) -> dict[str, Any]:
    """What is trained on what."""
    takes, config = input_of(model), model.pretrained_cfg
    for key, value in (("mean", takes.mean), ("std", takes.std)):
        shown = getattr(domain.preprocess, key, value)
        if shown != value:
            raise InputError(
                f"{domain.key} is normalised with {key} {shown}, but the model expects {value}: open it with "
                "Preprocess.for_model(model)."
            )
    return {
        "model": ".".join(filter(None, (config["architecture"], config.get("tag")))),
        "input_size": [3, takes.size, takes.size],
        "mean": list(takes.mean),
        "std": list(takes.std),
        "crop_pct": takes.share,
        "classes": list(class_names),
        "data": domain.identity,
        "images": len(domain.labels),
    }


def _weights_digest(file: AnyPath) -> str:
    try:
        return f"file {file_digest(Path(file))}"
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}).") from None
