"""A training loop that can be interrupted and resumed, and that ends with the same weights in any case.

Every epoch draws from generators seeded with (seed, epoch), and ends with a checkpoint beside the output. A training that
was interrupted or killed therefore ends with the same weights bit for bit, on the same machine with the same number of
threads.
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
from ..core.statecheck import fitted, require_parts
from ..data.domains import Domain, Subset
from ..data.streams import Stream
from ..errors import ConfigError, InputError, NonFiniteError, StateError, shorten_list
from ..models.view import ModelView

MOMENTUM = "momentum/"  # prefix of the optimizer's tensors in a checkpoint


class Schedule(Protocol):
    """The attributes of a recipe that the training loop uses."""

    @property
    def epochs(self) -> int:
        """The number of passes over the images."""

    @property
    def batch_size(self) -> int:
        """The number of images in a step."""


class Training:
    """A model in training, with everything that a checkpoint contains.

    Args:
        view: The model.
        learned: The module whose tensors are stored in checkpoints.
        optimizer: The optimizer of the parameters of `learned`.
        schedule: The number of epochs and the batch size.
        seed: The seed of all random numbers.
        autocast: Whether to compute in bfloat16 where torch considers it safe.
    """

    def __init__(
        self,
        view: ModelView,
        learned: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        seed: int,
        autocast: bool,
    ) -> None:
        self.view, self.learned, self.optimizer = view, learned, optimizer
        self.schedule, self.seed, self.autocast = schedule, seed, autocast
        self.history: list[list[float]] = []  # of each epoch: mean loss, accuracy on the images held out

    def step(self, images: Tensor, labels: Tensor, draws: np.random.RandomState, done: float) -> float:
        """Learn from a batch, and return the loss from before the update.

        `done` is the share of the training that is finished.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: those of `learned`, and the momentum of the optimizer."""
        moving = {name: self.optimizer.state[p].get("momentum_buffer") for name, p in self.learned.named_parameters()}
        named = {f"{MOMENTUM}{name}": tensor for name, tensor in moving.items() if tensor is not None}
        return {**self.learned.state_dict(), **named}

    def resume(self, path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Load a checkpoint, and refuse one that is not of this training. `path` is used in error messages."""
        moving = {f"{MOMENTUM}{name}": p for name, p in self.learned.named_parameters() if f"{MOMENTUM}{name}" in tensors}
        what = f"{path} is not a checkpoint of this training"
        tensors = fitted(what, tensors, {**self.learned.state_dict(), **moving})
        require_parts(path, header, history=list)
        for epoch in header["history"]:
            if not (isinstance(epoch, list) and len(epoch) == 2 and all(isinstance(number, float) for number in epoch)):
                raise StateError(f"{what}: its history has an epoch that is not a loss and an accuracy.")
        self.learned.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in moving})
        for name, p in moving.items():
            self.optimizer.state[p]["momentum_buffer"] = tensors[name].to(p.device)
        self.history = header["history"]

    def train(
        self,
        begun: tuple[dict[str, Tensor], dict[str, Any]] | None,
        out: Path,
        settings: Mapping[str, Any],
        kind: str,
        parts: tuple[Domain, Domain],
        workers: int,
        console: Console,
    ) -> None:
        """Train to the end, from the beginning or from a checkpoint.

        Checkpoints of this kind are stored beside `out`.
        """
        unfinished = checkpoint_of(out)

        def save() -> None:
            statefile.write(unfinished, self.tensors(), {"kind": kind, "settings": settings, "history": self.history})

        if begun is None:
            save()  # fails now if the file cannot be written
            out.unlink(missing_ok=True)
        else:
            self.resume(unfinished, *begun)
            say(console, f"{unfinished}: going on after epoch {len(self.history)} of {self.schedule.epochs}.")
        self.train_epochs(*parts, workers, console, save)

    def train_epochs(
        self, train: Domain, held_out: Domain, workers: int, console: Console, save: Callable[[], None]
    ) -> None:
        """Train the remaining epochs, with a checkpoint after each."""
        size, epochs = self.schedule.batch_size, self.schedule.epochs
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task("", total=epochs, completed=len(self.history))
            while (epoch := len(self.history)) < epochs:
                began, draws = time.monotonic(), draws_for(self.seed, "epoch", epoch)
                stream = Stream(train, batch_size=size, seed=int(draws.randint(2**31)), workers=workers)
                before = f", held out {self.history[-1][1]:.1%}" if epoch else ""
                losses: list[float] = []
                torch.manual_seed(int(draws.randint(2**31)))  # for models with dropout
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
        """Return the accuracy of the model on a stream."""
        self.view.model.eval()
        right = [self.logits(self.view.check(batch.images)).argmax(1).cpu() == batch.labels for batch in stream]
        return torch.cat(right).double().mean().item()

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits of a batch in float32, and refuse logits that are not finite."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.view.logits(images).float()
        self.require_finite(logits)
        return logits

    def require_finite(self, values: Tensor) -> None:
        """Refuse values that are not finite, because the training has diverged."""
        if not values.isfinite().all():
            raise NonFiniteError(
                f"The training diverged in epoch {len(self.history) + 1}: begin again with lower learning rates."
            )


def split(domain: Domain, class_names: Sequence[str], share: float, seed: int) -> tuple[Subset, Subset]:
    """Split a domain into images to train on, and images held out: a share of each class, at least one image."""
    labels, draws = domain.labels, draws_for(seed, "held out")
    if len(class_names) < 2:
        raise InputError(f"{domain.key} has {len(class_names)} class: there is nothing to tell apart. Give two or more.")
    if labels.min() < 0 or labels.max() >= len(class_names):
        raise InputError(f"{domain.key} has labels from {labels.min()} to {labels.max()} for {len(class_names)} classes.")
    counts = np.bincount(labels, minlength=len(class_names))
    few = [f"{name} has {count}" for name, count in zip(class_names, counts) if count < 2]
    if few:
        raise InputError(f"{domain.key}: a class needs an image to train on and one to hold out; {shorten_list(few)}.")
    chosen = np.zeros(len(labels), bool)
    for label, count in enumerate(counts):
        chosen[draws.permutation(np.flatnonzero(labels == label))[: max(1, round(share * count))]] = True
    return Subset(domain, np.flatnonzero(~chosen)), Subset(domain, np.flatnonzero(chosen))


def checkpoint_of(out: Path) -> Path:
    """Return the path of the checkpoint of a training whose output will be `out`."""
    if out.suffix != ".safetensors":
        raise ConfigError(f"{out}: give the output a name that ends in .safetensors.")
    return out.with_name(f"{out.name}.unfinished")


def relative_lr(done: float, warmup: float) -> float:
    """Return a learning rate relative to its peak, when a share `done` of all steps is finished.

    It rises linearly during the warm-up, and falls along a cosine.
    """
    return min(1.0, done / warmup if warmup else 1.0) * 0.5 * (1 + math.cos(math.pi * done))


def augmented(images: Tensor, draws: np.random.RandomState, area: float, stretch: float) -> Tensor:
    """Return a random crop of every image at full size, half of them flipped: `RandomResizedCrop` for a batch."""
    size, aspect, x, y, flip = torch.from_numpy(draws.random_sample((5, len(images))))
    size = area + (1 - area) * size
    aspect = ((2 * aspect - 1) * math.log(stretch)).exp()
    width, height = (size * aspect).sqrt().clamp(max=1), (size / aspect).sqrt().clamp(max=1)
    where = torch.zeros(len(images), 2, 3, dtype=torch.float64)  # maps from the new image to the old one
    where[:, 0, 0], where[:, 1, 1] = torch.where(flip < 0.5, -width, width), height
    where[:, 0, 2], where[:, 1, 2] = (2 * x - 1) * (1 - width), (2 * y - 1) * (1 - height)  # positions are from -1 to 1
    grid = F.affine_grid(where.to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def draws_for(*key: object) -> np.random.RandomState:
    """Return a generator whose random numbers depend only on the key.

    It is a `RandomState`, for which numpy guarantees the same numbers in all versions.
    """
    digest = hashlib.sha256("|".join(map(str, key)).encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4"))


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Let torch use deterministic algorithms inside the block, and keep its global random state unchanged."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise torch refuses to multiply matrices on a GPU
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def versions_used() -> dict[str, str]:
    """Return the versions of Python and of the libraries that determine the weights."""
    found = {name: metadata.version(name) for name in ("torch", "timm", "numpy", "pillow")}
    return {"acclimate": __version__, "python": platform.python_version(), **found}


def say(console: Console, text: str) -> None:
    """Print a line of plain text."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def read_trained(
    path: Path, kind: str, settings: Mapping[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the tensors and the header of a file of this kind, or None if there is no file.

    A file that was made with other settings is refused.
    """
    if not path.exists():
        return None
    tensors, header = statefile.read_kind(path, kind)
    if settings is not None:
        require_parts(path, header, settings=dict)
        was, now = _flat(header["settings"]), _flat(settings)
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        other = [f"{name} was {was.get(name, 'not set')[:60]}, now {now.get(name, 'not set')[:60]}" for name in names]
        if other:
            raise StateError(
                f"{path} is of another training: {shorten_list(other, '; ')}. Repeat that one, give another output, or "
                "train again with fresh=True (on the command line --fresh)."
            )
    return tensors, header


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Return nested settings as text, by their full names."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": json.dumps(value)}
    return flat
