"""Training of a source model: a timm ViT with a new head, fine-tuned on one domain.

    data = open_data("office-home", root, Preprocess.for_model(timm.create_model(name)), domains=["Art"])
    train_source(data.domains[0], data.class_names, "art.safetensors", model=name)
    model = load_source("art.safetensors")

The recipe is ours. The paper says of Office-Home only that the classifier head is replaced and the model is fine-tuned. The
accuracy of these models is therefore not that of its row "Source". As in the fine-tuning of the ViT's authors (Dosovitskiy
et al. 2021), all weights are trained by SGD with momentum, from a head of zeros, with a cosine schedule, gradients clipped
at norm 1, and no weight decay. We add warm-up, label smoothing, a lower learning rate of the backbone, crops and flips.
Nothing was tuned.

A tenth of every class is held out. It is scored after each epoch, but no choice depends on it: the weights are those at the
end.
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
from ..core.statecheck import require_parts
from ..data.domains import Domain
from ..data.imagefile import AnyPath
from ..data.preprocess import input_of
from ..errors import ConfigError, InputError, require_between, require_whole
from ..models.families import view_of
from ..models.loading import SOURCE_MODEL, create_timm, pick_device
from .loop import Training, augmented, checkpoint_of, deterministic, read_trained, relative_lr, split, versions_used

MODEL = "vit_base_patch16_224.augreg_in21k_ft_in1k"
VERSION = 1  # of the parts of the recipe that are not in `Recipe`
UNFINISHED = f"unfinished {SOURCE_MODEL}"  # the kind of its checkpoints


@dataclass(frozen=True)
class Recipe:
    """The hyper-parameters of fine-tuning.

    Args:
        epochs: The number of passes over the images. 20 epochs are 700 to 1260 steps for the domains of Office-Home. This is
            a short training, but enough for a pretrained backbone; fewer images need more epochs.
        batch_size: The number of images in a step.
        head_lr: The highest learning rate of the new head, at the end of the warm-up.
        backbone_lr: The highest learning rate of all other weights.
        momentum: The momentum of SGD.
        warmup: The share of all steps in which the learning rates rise. Then they fall to zero along a cosine.
        smoothing: The share of a label's weight that is spread over all classes.
        clip: The largest norm of the gradient.
        area: The smallest share of an image that a random crop keeps. Crops are scaled to full size, and half of them are
            flipped.
        stretch: The largest ratio of the sides of a crop.
        held_out: The share of every class that is not trained on; at least one image.
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
    """A finished source model, with its accuracy on the images held out."""

    accuracy: float
    held_out: int  # number of images on which the accuracy is measured
    found: bool  # whether it was finished by an earlier call


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
    """Fine-tune a timm ViT on a domain, and write it to a file.

    An unfinished training is continued, and a finished one is not repeated.

    Args:
        domain: The images, normalised as the model expects.
        class_names: The names of the classes, by label.
        out: The file to write, `*.safetensors`. Until the training is finished, a checkpoint is beside it:
            `*.safetensors.unfinished`.
        model: The name of a timm model, with the tag of its weights.
        weights: A local file with weights to start from, instead of a download. Its head is not used.
        pretrained: Whether to start from trained weights instead of random ones.
        recipe: The hyper-parameters of fine-tuning.
        seed: The seed of the choice of images held out, of their order, of the crops, and of random weights.
        device: The device. Default: a GPU if there is one.
        autocast: Whether to compute in bfloat16 where torch considers it safe. It is faster on a GPU, and changes the
            weights.
        workers: The number of processes that load images in advance; 0 loads them in this process.
        fresh: Whether to train again if the training is finished or begun.
        console: The console for progress: a bar on a terminal, and otherwise a line for each epoch.
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
            require_parts(out, finished[1], accuracy=float, held_out=int)
            unfinished.unlink(missing_ok=True)
            return Trained(finished[1]["accuracy"], finished[1]["held_out"], found=True)

        begun = None if fresh else read_trained(unfinished, UNFINISHED, settings)
        if begun is None and pretrained:
            net = create_timm(model, weights=weights, num_classes=len(class_names))
        run = _FineTuning(net.to(where), recipe, seed, autocast)
        run.train(begun, out, settings, UNFINISHED, (train, held_out), workers, console)
    outcome = Trained(run.history[-1][1], len(held_out.labels), found=False)
    header = {"kind": SOURCE_MODEL, "settings": settings, "history": run.history, "num_classes": len(class_names)}
    made = {"versions": versions_used(), "device": str(where), "threads": torch.get_num_threads()}
    statefile.write(out, net.state_dict(), {**header, **made, "accuracy": outcome.accuracy, "held_out": outcome.held_out})
    unfinished.unlink(missing_ok=True)
    return outcome


class _FineTuning(Training):
    """The fine-tuning of all weights, from a head of zeros."""

    def __init__(self, model: nn.Module, recipe: Recipe, seed: int, autocast: bool) -> None:
        self.model, self.recipe, view = model, recipe, view_of(model)
        head = list(view.head.parameters())
        for parameter in head:
            nn.init.zeros_(parameter)
        rest = [p for p in model.parameters() if all(p is not other for other in head)]
        groups = [{"params": head, "peak": recipe.head_lr}, {"params": rest, "peak": recipe.backbone_lr}]
        super().__init__(view, model, torch.optim.SGD(groups, lr=0.0, momentum=recipe.momentum), recipe, seed, autocast)

    def step(self, images: Tensor, labels: Tensor, draws: np.random.RandomState, done: float) -> float:
        """Learn from one augmented batch, and return the loss from before the update."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * relative_lr(done, self.recipe.warmup)
        shown = augmented(self.view.check(images), draws, self.recipe.area, self.recipe.stretch)
        loss = F.cross_entropy(self.logits(shown), labels.to(shown.device), label_smoothing=self.recipe.smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.require_finite(norm)
        self.optimizer.step()
        return loss.item()


def _identity(model: Any, domain: Domain, class_names: Sequence[str]) -> dict[str, Any]:
    """Return a description of the model and of the data that it is trained on."""
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
