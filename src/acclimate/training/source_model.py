"""A source model for data that has none: a timm ViT with a new head, fine-tuned on one domain.

    data = open_data("office-home", root, Preprocess.for_model(timm.create_model(name)), domains=["Art"])
    train_source(data.domains[0], data.class_names, "art.safetensors", model=name)
    model = load_source("art.safetensors")

The recipe is ours. The paper says no more of Office-Home than that the classifier head is replaced and the model fine-tuned,
so the accuracy of a model from here is not that of its Source row. As the ViT's authors fine-tune (Dosovitskiy et al. 2021)
all weights are trained by SGD with momentum, from a head of zeros, along a cosine, gradients clipped at norm 1, without
weight decay. Warm-up, smoothed labels, a slower backbone, crops and flips are added. None of it was tuned.

A tenth of every class is held out. It is scored after each epoch and decides nothing: the weights are those at the end.

Every epoch draws from generators seeded with (seed, epoch) and ends with a checkpoint beside the output. So a training that
was interrupted, or killed, goes on when it is called again, and ends with the same weights to the last bit, on the same
machine with the same number of threads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from .. import __version__
from ..core import statefile
from ..data.corruptions import Integers
from ..data.datasets import Domain, title
from ..data.disk import input_of
from ..data.folder import AnyPath
from ..data.streams import Stream
from ..errors import (
    AcclimateError,
    ConfigError,
    InputError,
    NonFiniteError,
    StateError,
    require_between,
    require_whole,
    some,
)
from ..models.families import view
from ..models.loading import create_timm, pick_device
from ..models.view import ViT

MODEL = "vit_base_patch16_224.augreg_in21k_ft_in1k"
VERSION = 1  # of the recipe: what the numbers in `Recipe` do not say
FINISHED, UNFINISHED = "source model", "unfinished source model"  # kinds of files
MOMENTUM = "momentum/"  # before the names of the optimizer's tensors in a checkpoint


@dataclass(frozen=True)
class Recipe:
    """How to fine-tune.

    Args:
        epochs: Passes over the pictures. 20 are 700 to 1260 steps for the domains of Office-Home, short for a training but
            enough for a backbone that is trained already; fewer pictures need more.
        batch_size: Pictures in a step.
        head_lr: The highest learning rate of the new head, at the end of the warm-up.
        backbone_lr: The same of all the rest.
        momentum: Of SGD.
        warmup: Share of all steps in which the learning rates rise; then they fall to zero along a cosine.
        smoothing: Share of a label's weight that is spread over all classes.
        clip: The largest norm of the gradient.
        area: The smallest share of a picture that a random crop keeps. Crops are scaled to full size, half of them flipped.
        stretch: The largest ratio of a crop's sides.
        held_out: Share of every class that is not trained on; at least one picture.
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
    held_out: int  # pictures on which it is measured
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
        domain: Pictures, normalised as the model expects them.
        class_names: By label.
        out: The file, `*.safetensors`. Until it is finished, a checkpoint is beside it: `*.safetensors.unfinished`.
        model: Name in timm, with the tag of its weights.
        weights: A local file with weights to start from, instead of a download. Its head is not used.
        pretrained: Start from trained weights, not from random ones.
        recipe: How to train.
        seed: Of the pictures that are held out, their order, the crops, and random weights.
        device: Default: a GPU if there is one.
        autocast: Compute in bfloat16 where torch thinks it safe: faster on a GPU, other weights.
        workers: Processes that load pictures ahead; 0 loads in this one.
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
            "weights": start if weights is None else _digest(weights),
            "recipe": {"by": "acclimate", "version": VERSION, **asdict(recipe)},
            "seed": seed,
            "autocast": autocast,
        }
        finished = read_trained(out, FINISHED, None if fresh else settings)
        if finished is not None and not fresh:
            unfinished.unlink(missing_ok=True)
            return Trained(finished[1]["accuracy"], finished[1]["held_out"], found=True)

        begun = None if fresh else read_trained(unfinished, UNFINISHED, settings)
        if begun is None and pretrained:
            net = create_timm(model, weights=weights, num_classes=len(class_names))
        run = _FineTuning(net.to(where), recipe, seed, autocast)
        run.carry_out(begun, out, settings, UNFINISHED, (train, held_out), workers, console)
    outcome = Trained(run.history[-1][1], len(held_out.labels), found=False)
    header = {"kind": FINISHED, "settings": settings, "history": run.history, "num_classes": len(class_names)}
    made = {"versions": versions_used(), "device": str(where), "threads": torch.get_num_threads()}
    statefile.write(out, net.state_dict(), {**header, **made, "accuracy": outcome.accuracy, "held_out": outcome.held_out})
    unfinished.unlink(missing_ok=True)
    return outcome


def load_source(path: AnyPath) -> nn.Module:
    """The model that `train_source` wrote, with its normalisation in `pretrained_cfg`, where timm and `open_data` look."""
    from timm.data import resolve_model_data_config

    found = read_trained(Path(path), FINISHED)
    if found is None:
        raise StateError(f"{path} does not exist.")
    tensors, header = found
    try:
        told = header["settings"]
        names = tuple(told["classes"])
        model: Any = create_timm(told["model"], pretrained=False, num_classes=len(names))
        model.load_state_dict(tensors)
        takes = {key: tuple(told[key]) for key in ("input_size", "mean", "std")} | {"crop_pct": told["crop_pct"]}
        model.pretrained_cfg = {**model.pretrained_cfg, **takes, "num_classes": len(names), "label_names": names}
        model.default_cfg = model.pretrained_cfg  # timm's older name for it
        resolved = resolve_model_data_config(model)
        if input_of(model).size != takes["input_size"][1] or any(resolved[key] != takes[key] for key in takes):
            raise StateError(f"it reads {resolved} where {takes} is written.")
    except (AcclimateError, RuntimeError, KeyError, TypeError) as error:
        versions = f"timm {metadata.version('timm')}, and was made with {header.get('versions', {}).get('timm')}"
        raise StateError(f"{path} cannot be rebuilt by {versions}: {error}") from error
    return model.eval()


class Part:
    """Some pictures of a domain."""

    def __init__(self, domain: Domain, chosen: Integers) -> None:
        self.name, self.severity, self.labels = domain.name, domain.severity, domain.labels[chosen]
        self._domain, self._chosen = domain, chosen

    @property
    def identity(self) -> dict[str, Any]:
        return {**self._domain.identity, "chosen": hashlib.sha256(self._chosen.tobytes()).hexdigest()[:16]}

    def load(self, indices: Integers) -> Tensor:
        return self._domain.load(self._chosen[indices])


def split(domain: Domain, class_names: Sequence[str], share: float, seed: int) -> tuple[Part, Part]:
    """A domain to train on, and a share of each of its classes, at least one picture, that is held out."""
    labels, draws = domain.labels, draws_for(seed, "held out")
    if len(class_names) < 2:
        raise InputError(f"{title(domain)} has {len(class_names)} class: there is nothing to tell apart. Give two or more.")
    if labels.min() < 0 or labels.max() >= len(class_names):
        raise InputError(f"{title(domain)} has labels from {labels.min()} to {labels.max()} for {len(class_names)} classes.")
    counts = np.bincount(labels, minlength=len(class_names))
    few = [f"{name} has {count}" for name, count in zip(class_names, counts) if count < 2]
    if few:
        raise InputError(f"{title(domain)}: a class needs a picture to train on and one to hold out; {some(few)}.")
    chosen = np.zeros(len(labels), bool)
    for label, count in enumerate(counts):
        chosen[draws.permutation(np.flatnonzero(labels == label))[: max(1, round(share * count))]] = True
    return Part(domain, np.flatnonzero(~chosen)), Part(domain, np.flatnonzero(chosen))


class Schedule(Protocol):
    """What a training has to know of a recipe."""

    @property
    def epochs(self) -> int: ...

    @property
    def batch_size(self) -> int: ...


class Training:
    """A model in training: all that a checkpoint holds, and how it goes on.

    Args:
        vit: The model.
        learned: The module whose tensors are the checkpoint's.
        optimizer: Of its parameters.
        schedule: How long, and how many pictures at a time.
        seed: Of all that is random.
        autocast: Compute in bfloat16 where torch thinks it safe.
    """

    def __init__(
        self, vit: ViT, learned: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, seed: int, autocast: bool
    ) -> None:
        self.vit, self.learned, self.optimizer = vit, learned, optimizer
        self.schedule, self.seed, self.autocast = schedule, seed, autocast
        self.history: list[list[float]] = []  # of each epoch: mean loss, accuracy on what is held out

    def step(self, images: Tensor, labels: Tensor, draws: np.random.RandomState, done: float) -> float:
        """Learn from a batch when a share of the training is `done`; the loss before."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        moving = {name: self.optimizer.state[p].get("momentum_buffer") for name, p in self.learned.named_parameters()}
        named = {f"{MOMENTUM}{name}": tensor for name, tensor in moving.items() if tensor is not None}
        return {**self.learned.state_dict(), **named}

    def resume(self, tensors: Mapping[str, Tensor], history: list[list[float]]) -> None:
        self.learned.load_state_dict({name: tensor for name, tensor in tensors.items() if not name.startswith(MOMENTUM)})
        for name, p in self.learned.named_parameters():
            if f"{MOMENTUM}{name}" in tensors:
                self.optimizer.state[p]["momentum_buffer"] = tensors[f"{MOMENTUM}{name}"].to(p.device)
        self.history = history

    def carry_out(
        self,
        begun: tuple[dict[str, Tensor], dict[str, Any]] | None,
        out: Path,
        settings: Mapping[str, Any],
        kind: str,
        parts: tuple[Domain, Domain],
        workers: int,
        console: Console,
    ) -> None:
        """Begin, or go on from a checkpoint, and train to the end; checkpoints of this kind are beside `out`."""
        unfinished = checkpoint_of(out)

        def save() -> None:
            statefile.write(unfinished, self.tensors(), {"kind": kind, "settings": settings, "history": self.history})

        if begun is None:
            save()  # so that a place where nothing can be written is noticed now
            out.unlink(missing_ok=True)
        else:
            self.resume(begun[0], begun[1]["history"])
            say(console, f"{unfinished}: going on after epoch {len(self.history)} of {self.schedule.epochs}.")
        self.to_the_end(*parts, workers, console, save)

    def to_the_end(self, train: Domain, held_out: Domain, workers: int, console: Console, save: Callable[[], None]) -> None:
        size, epochs = self.schedule.batch_size, self.schedule.epochs
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task("", total=epochs, completed=len(self.history))
            while (epoch := len(self.history)) < epochs:
                began, draws = time.monotonic(), draws_for(self.seed, "epoch", epoch)
                stream = Stream(train, batch_size=size, seed=int(draws.randint(2**31)), workers=workers)
                before = f", held out {self.history[-1][1]:.1%}" if epoch else ""
                losses: list[float] = []
                torch.manual_seed(int(draws.randint(2**31)))  # for a model with dropout
                for batch in stream:
                    done = epoch + (len(losses) + 0.5) / len(stream)
                    losses.append(self.step(batch.images, batch.labels, draws, done / epochs))
                    line = f"epoch {epoch + 1}/{epochs}: loss {sum(losses) / len(losses):.3f}"
                    progress.update(task, completed=done, description=line + before)
                accuracy = self.accuracy(Stream(held_out, batch_size=size, workers=workers))
                self.history.append([sum(losses) / len(losses), accuracy])
                save()
                if not console.is_terminal:
                    say(console, f"{line}, held out {accuracy:.1%}, {time.monotonic() - began:.0f} s")

    @torch.no_grad()
    def accuracy(self, stream: Stream) -> float:
        self.vit.model.eval()
        right = [self.logits(self.vit.check(batch.images)).argmax(1).cpu() == batch.labels for batch in stream]
        return torch.cat(right).double().mean().item()

    def logits(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.vit.logits(images).float()
        self.require_finite(logits)
        return logits

    def require_finite(self, values: Tensor) -> None:
        if not values.isfinite().all():
            raise NonFiniteError(
                f"The training diverged in epoch {len(self.history) + 1}: begin again with lower learning rates."
            )


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


def checkpoint_of(out: Path) -> Path:
    """Where a training is kept until it is finished and in `out`."""
    if out.suffix != ".safetensors":
        raise ConfigError(f"{out}: give the output a name that ends in .safetensors.")
    return out.with_name(f"{out.name}.unfinished")


def pace(done: float, warmup: float) -> float:
    """The share of its peak that a learning rate has when a share of all steps is done: a short rise, then a cosine."""
    return min(1.0, done / warmup if warmup else 1.0) * 0.5 * (1 + math.cos(math.pi * done))


def augmented(images: Tensor, draws: np.random.RandomState, area: float, stretch: float) -> Tensor:
    """A random part of every picture at full size, half of them flipped: `RandomResizedCrop` for a batch."""
    size, aspect, x, y, flip = torch.from_numpy(draws.random_sample((5, len(images))))
    size = area + (1 - area) * size
    aspect = ((2 * aspect - 1) * math.log(stretch)).exp()
    width, height = (size * aspect).sqrt().clamp(max=1), (size / aspect).sqrt().clamp(max=1)
    where = torch.zeros(len(images), 2, 3, dtype=torch.float64)  # from places in the new picture to those in the old one
    where[:, 0, 0], where[:, 1, 1] = torch.where(flip < 0.5, -width, width), height
    where[:, 0, 2], where[:, 1, 2] = (2 * x - 1) * (1 - width), (2 * y - 1) * (1 - height)  # a picture is from -1 to 1
    grid = F.affine_grid(where.to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def draws_for(*key: object) -> np.random.RandomState:
    """Random numbers that depend on the key alone; numpy promises that its old generator draws the same for ever."""
    digest = hashlib.sha256("|".join(map(str, key)).encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4"))


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """The same sums every time, and torch's global random numbers as if nothing had happened."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses to multiply on a GPU
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def _identity(model: Any, domain: Domain, class_names: Sequence[str]) -> dict[str, Any]:
    """What is trained on what."""
    takes, config = input_of(model), model.pretrained_cfg
    shown = domain.identity.get("preprocess", {})
    for key, value in (("mean", takes.mean), ("std", takes.std)):
        if tuple(shown.get(key, value)) != value:
            raise InputError(
                f"{title(domain)} is normalised with {key} {tuple(shown[key])}, but the model expects {value}: open it with "
                "Preprocess.for_model(model)."
            )
    return {
        "model": ".".join(filter(None, (config["architecture"], config.get("tag")))),
        "input_size": [3, takes.size, takes.size],
        "mean": list(takes.mean),
        "std": list(takes.std),
        "crop_pct": takes.share,
        "classes": list(class_names),
        "data": dict(domain.identity),
    }


def read_trained(
    path: Path, kind: str, settings: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """A file of this kind and, if given, of these settings; None if there is no file."""
    if not path.exists():
        return None
    tensors, header = statefile.read(path)
    if header.get("kind") != kind:
        raise StateError(f"{path} is no {kind} that acclimate trained, but a {header.get('kind', 'state file')}.")
    if settings is not None:
        was, now = _flat(header["settings"]), _flat(settings)
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        other = [f"{name} was {was.get(name, 'not set')[:60]}, now {now.get(name, 'not set')[:60]}" for name in names]
        if other:
            raise StateError(
                f"{path} is of another training: {some(other, '; ')}. Repeat that one, give another output, or train again "
                "with fresh=True (on the command line --fresh)."
            )
    return tensors, header


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Settings by their full names, as text."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": json.dumps(value)}
    return flat


def _digest(file: AnyPath) -> str:
    try:
        return f"file {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}"
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}).") from None


def versions_used() -> dict[str, str]:
    found = {name: metadata.version(name) for name in ("torch", "timm", "numpy", "pillow")}
    return {"acclimate": __version__, "python": platform.python_version(), **found}


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
