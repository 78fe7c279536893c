"""A training that can be interrupted: it goes on when it is called again, and ends with the same weights.

Every epoch draws from generators seeded with (seed, epoch) and ends with a checkpoint beside the output. So a training that
was interrupted, or killed, ends with the same weights to the last bit, on the same machine with the same number of threads.
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
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from .. import __version__
from ..core import statefile
from ..data.domains import Domain, Subset
from ..data.streams import Stream
from ..errors import ConfigError, InputError, NonFiniteError, StateError, some
from ..models.view import ViT

MOMENTUM = "momentum/"  # before the names of the optimizer's tensors in a checkpoint


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
        schedule: How long, and how many images at a time.
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


def split(domain: Domain, class_names: Sequence[str], share: float, seed: int) -> tuple[Subset, Subset]:
    """A domain to train on, and a share of each of its classes, at least one image, that is held out."""
    labels, draws = domain.labels, draws_for(seed, "held out")
    if len(class_names) < 2:
        raise InputError(f"{domain.key} has {len(class_names)} class: there is nothing to tell apart. Give two or more.")
    if labels.min() < 0 or labels.max() >= len(class_names):
        raise InputError(f"{domain.key} has labels from {labels.min()} to {labels.max()} for {len(class_names)} classes.")
    counts = np.bincount(labels, minlength=len(class_names))
    few = [f"{name} has {count}" for name, count in zip(class_names, counts) if count < 2]
    if few:
        raise InputError(f"{domain.key}: a class needs an image to train on and one to hold out; {some(few)}.")
    chosen = np.zeros(len(labels), bool)
    for label, count in enumerate(counts):
        chosen[draws.permutation(np.flatnonzero(labels == label))[: max(1, round(share * count))]] = True
    return Subset(domain, np.flatnonzero(~chosen)), Subset(domain, np.flatnonzero(chosen))


def checkpoint_of(out: Path) -> Path:
    """Where a training is kept until it is finished and in `out`."""
    if out.suffix != ".safetensors":
        raise ConfigError(f"{out}: give the output a name that ends in .safetensors.")
    return out.with_name(f"{out.name}.unfinished")


def pace(done: float, warmup: float) -> float:
    """The share of its peak that a learning rate has when a share of all steps is done: a short rise, then a cosine."""
    return min(1.0, done / warmup if warmup else 1.0) * 0.5 * (1 + math.cos(math.pi * done))


def augmented(images: Tensor, draws: np.random.RandomState, area: float, stretch: float) -> Tensor:
    """A random part of every image at full size, half of them flipped: `RandomResizedCrop` for a batch."""
    size, aspect, x, y, flip = torch.from_numpy(draws.random_sample((5, len(images))))
    size = area + (1 - area) * size
    aspect = ((2 * aspect - 1) * math.log(stretch)).exp()
    width, height = (size * aspect).sqrt().clamp(max=1), (size / aspect).sqrt().clamp(max=1)
    where = torch.zeros(len(images), 2, 3, dtype=torch.float64)  # from places in the new image to those in the old one
    where[:, 0, 0], where[:, 1, 1] = torch.where(flip < 0.5, -width, width), height
    where[:, 0, 2], where[:, 1, 2] = (2 * x - 1) * (1 - width), (2 * y - 1) * (1 - height)  # an image is from -1 to 1
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


def versions_used() -> dict[str, str]:
    found = {name: metadata.version(name) for name in ("torch", "timm", "numpy", "pillow")}
    return {"acclimate": __version__, "python": platform.python_version(), **found}


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def read_trained(
    path: Path, kind: str, settings: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """A file of this kind and, if given, of these settings; None if there is no file."""
    if not path.exists():
        return None
    tensors, header = statefile.read_kind(path, kind)
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
