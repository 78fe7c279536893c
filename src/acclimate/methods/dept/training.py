"""Train the prompts, classifier and DINO heads of DePT-G on labelled source images.

    data = open_data("folder", root, model)
    train_prompts(model, data.domains[0], data.class_names, "prompts.safetensors")
    model = acclimate.adapt(model, "dept-g", source_statistics="prompts.safetensors")

The losses, the optimizer and its schedule are those of the source phase of DePT (Gao et al., 2022). Ours: the backbone does
not change, while the authors train all weights, the backbone at a tenth of the learning rate of the parts that are trained
here. Therefore the adapted model is the same source model as for other methods, and a file has only the added parts. Also
ours are the flips of the images, and the held-out tenth of every class, on which the accuracy is measured after each epoch;
it does not affect the training.

As in `train.py`, an interrupted training is continued by a repetition of the call, and ends with the same weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from ...core import statefile
from ...core.engine import Engine, keep_all
from ...core.statistics import SourceStatistics
from ...core.wrapping import require_unwrapped
from ...data.domains import Domain
from ...data.imagefile import AnyPath
from ...errors import InputError, require_between, require_whole
from ...models.families import view_of
from ...models.fingerprint import fingerprint
from ...models.loading import pick_device
from ...models.view import ModelView
from ...training.loop import (
    Training,
    augmented,
    checkpoint_of,
    deterministic,
    read_trained,
    relative_lr,
    split,
    versions_used,
)
from .._teacher import Teacher
from .network import PROMPTS, Prompted, Regulariser, Sizes, followed, named_prompts, sharpened

VERSION = 1  # version of the recipe, for changes that are not options of `PromptRecipe`
FINISHED, UNFINISHED = "trained prompts", "unfinished trained prompts"  # kinds of files


@dataclass(frozen=True)
class PromptRecipe:
    """The hyperparameters of the training of prompts; the defaults are the authors' for ImageNet.

    Args:
        epochs: Number of passes over the images.
        batch_size: Number of images in a step.
        lr: The highest learning rate, at the end of the warm-up.
        momentum: Nesterov's momentum of SGD.
        weight_decay: Weight decay.
        warmup: Number of steps in which the learning rate rises. Then it falls to zero along a cosine.
        smoothing: Share of the weight of a label that is spread over all classes.
        dino_weight: Weight of the agreement of student and teacher on the class token.
        prompt_weight: Weight of the agreement of student and teacher on the prompts.
        prompt_diversity: Weight of the diversity of the prompts.
        teacher_momentum: Share of the teacher that is kept at each step.
        student_temperature: Temperature of the DINO outputs of the student.
        teacher_temperature: Temperature of the DINO outputs of the teacher, after the first epochs.
        first_temperature: Temperature of the DINO outputs of the teacher, in the first epoch.
        warm_epochs: Number of epochs in which the temperature of the teacher rises.
        area: The smallest share of the area of an image that a random crop keeps. Student and teacher get a crop each.
        stretch: The largest ratio of the sides of a crop.
        held_out: Share of every class that is held out; at least one image.
    """

    epochs: int = 5
    batch_size: int = 128
    lr: float = 0.005
    momentum: float = 0.9
    weight_decay: float = 0.0001
    warmup: int = 200
    smoothing: float = 0.1
    dino_weight: float = 0.1
    prompt_weight: float = 0.1
    prompt_diversity: float = 0.005
    teacher_momentum: float = 0.99
    student_temperature: float = 0.1
    teacher_temperature: float = 0.07
    first_temperature: float = 0.04
    warm_epochs: int = 3
    area: float = 0.6
    stretch: float = 4 / 3
    held_out: float = 0.1

    def __post_init__(self) -> None:
        require_whole(1, epochs=self.epochs, batch_size=self.batch_size, warm_epochs=self.warm_epochs)
        require_whole(0, warmup=self.warmup)
        require_between(0, math.inf, lr=self.lr, weight_decay=self.weight_decay, dino_weight=self.dino_weight)
        require_between(0, math.inf, prompt_weight=self.prompt_weight, prompt_diversity=self.prompt_diversity)
        require_between(1e-6, 1, momentum=self.momentum)
        require_between(0, 1, smoothing=self.smoothing, teacher_momentum=self.teacher_momentum, area=self.area)
        require_between(1e-6, math.inf, student_temperature=self.student_temperature)
        require_between(1e-6, math.inf, teacher_temperature=self.teacher_temperature)
        require_between(1e-6, math.inf, first_temperature=self.first_temperature)
        require_between(1, 4, stretch=self.stretch)
        require_between(0, 0.5, held_out=self.held_out)

    def temperature(self, epoch: int) -> float:
        """Return the temperature of the teacher in an epoch, which rises over the first epochs."""
        risen = min(1.0, epoch / max(self.warm_epochs - 1, 1)) if self.warm_epochs > 1 else 1.0
        return self.first_temperature + risen * (self.teacher_temperature - self.first_temperature)


@torch.inference_mode(False)
def train_prompts(
    model: nn.Module,
    domain: Domain,
    class_names: Sequence[str],
    out: AnyPath,
    *,
    sizes: Sizes | None = None,
    recipe: PromptRecipe | None = None,
    seed: int = 0,
    device: str | None = None,
    workers: int = 0,
    fresh: bool = False,
    console: Console | None = None,
) -> SourceStatistics:
    """Train the prompts of DePT-G, or continue their training, and write them to a file.

    If the training is finished, the file is only read.

    Args:
        model: The source model, not wrapped. It does not change.
        domain: Labelled source images, normalised as the model expects them. A label is a column of the head of the model.
        class_names: The names of the classes, by label.
        out: The file, `*.safetensors`. Until the training is finished, there is a checkpoint beside it:
            `*.safetensors.unfinished`.
        sizes: The numbers of stages and prompts, and the sizes of the DINO heads.
        recipe: The hyperparameters of the training.
        seed: Seed of the initial values, the held-out images, the order of the images, and the crops.
        device: The device to train on; by default a GPU if there is one.
        workers: Number of processes that load images in advance; 0 loads them in this process.
        fresh: Whether to start again, even if the training is finished or begun.
        console: The console that shows progress: a bar on a terminal, otherwise a line for each epoch.

    Example:
        >>> train_prompts(model, domain, class_names, "prompts.safetensors")
        >>> model = acclimate.adapt(model, "dept-g", source_statistics="prompts.safetensors")
    """
    sizes, recipe, console, out = sizes or Sizes(), recipe or PromptRecipe(), console or Console(quiet=True), Path(out)
    unfinished = checkpoint_of(out)
    require_whole(0, seed=seed, workers=workers)
    require_unwrapped(model, "train prompts for the plain source model, before adapt().")
    original = view_of(model)
    if len(class_names) != original.classes:
        raise InputError(
            f"{domain.key} has {len(class_names)} classes, the model's head {original.classes}: give images of all of them."
        )
    parts = split(domain, class_names, recipe.held_out, seed)
    mine = {"class": type(model).__name__, **fingerprint(original, model.state_dict())}
    settings = {
        "model": mine,
        "classes": list(class_names),
        "data": domain.identity,
        "images": len(domain.labels),
        "sizes": asdict(sizes),
        "recipe": {"by": "acclimate", "version": VERSION, **asdict(recipe)},
        "seed": seed,
    }
    if not fresh and read_trained(out, FINISHED, settings) is not None:
        unfinished.unlink(missing_ok=True)
        return SourceStatistics.load(out)
    begun = None if fresh else read_trained(unfinished, UNFINISHED, settings)
    where = pick_device(device)
    with deterministic(where):
        view = view_of(copy.deepcopy(model).to(where).eval().requires_grad_(False))
        run = _PromptTraining(view, sizes, recipe, seed, len(parts[0].labels))
        run.train(begun, out, settings, UNFINISHED, parts, workers, console)
    shown = {"samples": len(parts[0].labels), "batch_size": recipe.batch_size, "labels": "given", "epochs": recipe.epochs}
    about = {**shown, **asdict(sizes), "held_out": len(parts[1].labels), "accuracy": run.history[-1][1]}
    header = {"kind": FINISHED, "settings": settings, "history": run.history, "versions": versions_used()}
    found = {"statistics": [PROMPTS], "model": mine, "about": about}
    statefile.write(out, named_prompts(run.student), {**header, **found, "device": str(where)})
    unfinished.unlink(missing_ok=True)
    return SourceStatistics.load(out)


class _PromptTraining(Training):
    """The training of the prompts, classifier and DINO heads of a student, with their average as the teacher."""

    def __init__(self, view: ModelView, sizes: Sizes, recipe: PromptRecipe, seed: int, images: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.recipe = recipe
        self.student = Prompted(view, sizes, rng).requires_grad_(True)
        self.student.insert(view)
        self.teacher = Teacher(self.student.parameters())
        self.warmup = recipe.warmup / (recipe.epochs * math.ceil(images / recipe.batch_size))
        self.centre = torch.zeros(sizes.outputs, device=view.device, dtype=view.dtype)
        learned = nn.ModuleDict({"student": self.student, "teacher": self.teacher})
        learned.register_buffer("centre", self.centre)
        self.engine = Engine(view, dict(self.student.named_parameters()), rng=rng)
        optimizer = torch.optim.SGD(
            self.student.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, nesterov=True
        )
        super().__init__(view, learned, optimizer, recipe, seed, False)

    def step(self, images: Tensor, labels: Tensor, draws: np.random.RandomState, done: float) -> float:
        """Train on one batch, and return its loss."""
        recipe, engine = self.recipe, self.engine
        self.view.model.eval()
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.lr * relative_lr(done, min(1.0, self.warmup))
        images = self.view.check(images)
        first, second = (augmented(images, draws, recipe.area, recipe.stretch) for _ in range(2))
        average = self.teacher.ahead(engine.adapted.tensors, recipe.teacher_momentum)
        with engine.adapted.using(average):
            _, _, token, stages = engine.evaluate(first, self.embed)
        target = sharpened(token, self.centre, recipe.temperature(len(self.history)))
        regulariser = Regulariser(
            recipe.dino_weight, recipe.prompt_weight, recipe.prompt_diversity, recipe.student_temperature
        )
        prompts = list(self.student.prompts)

        def objective(
            logits: Tensor, _: Tensor, token: Tensor, stages: Tensor, label: Tensor, target: Tensor, stage_target: Tensor
        ) -> tuple[Tensor, Tensor]:
            loss = F.cross_entropy(logits, label, reduction="none", label_smoothing=recipe.smoothing)
            return keep_all(loss + regulariser(token, stages, target, stage_target, prompts))

        given = [labels.to(images.device), target, stages]
        result = engine.gradient(second, objective, extras=given, forward=lambda x, *_: self.embed(x))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.teacher.become(average)
        self.centre.copy_(followed(self.centre, token.mean(0)))
        return result.loss

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits, features, and the DINO outputs of the class token and of the prompts."""
        return self.student.embed(self.view, images, self.engine.forward_features)
