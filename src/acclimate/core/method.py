"""The contract that a test-time adaptation method keeps.

A method is a `torch.nn.Module`. What it learns is a parameter, what it remembers is a buffer, the rest is optimizer state;
so reset, snapshot, save and rollback are written once, in the adapter. Its constructor is its configuration: typed keyword
arguments with the paper's defaults, each stored under its own name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..models.view import ViT
from .engine import Engine

if TYPE_CHECKING:
    from ..data.datasets import Domain
    from .statistics import SourceStatistics


@dataclass
class Step:
    """What a method's step returns: its prediction, and what it did to make or to follow it."""

    logits: Tensor  # or what stands for them: its softmax is taken as the prediction
    used: int = 0  # samples that it learned from
    loss: float | None = None
    recovery: float | None = None  # moving average that triggers a recovery, for methods that have one
    event: str | None = None


class Method(nn.Module):
    """Base class of all methods. Subclass it, decorate it with `acclimate.register("name")`, run `check_method("name")`."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    adapts: ClassVar[str] = "nothing"
    remembers: ClassVar[str] = "nothing"
    """What it keeps from step to step, beside what adapts."""
    augments: ClassVar[bool] = False
    """Whether it uses `engine.to_pixels`: a model whose normalisation is not known is then refused when it is wrapped."""
    predicts_after: ClassVar[bool] = False
    """Whether the logits of a step come from after its update anyway."""
    updates_once: ClassVar[bool] = True
    """Whether nothing can fail after a step's first update; otherwise the adapter keeps a copy of the state meanwhile."""
    searches: ClassVar[bool] = False
    """Whether it tries parameters far from the source's: then that distance is no sign of a collapse, to the guard."""
    quick: ClassVar[Mapping[str, Any]] = {}
    """Options with which the conformance suite runs, where the defaults would take it long."""
    exceptions: ClassVar[Mapping[str, str]] = {}
    """Checks of the conformance suite that this method cannot meet, each with the reason."""
    pictures: int = 1
    """Of which an image consists: where it is not 1, a batch is (batch, pictures, channels, height, width)."""
    needs: tuple[str, ...] = ()
    """Kinds of source statistics (see `source.py`) that this method cannot do without; some options may do without."""

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """The constructor's keyword arguments."""
        parameters = inspect.signature(cls.__init__, eval_str=False).parameters
        return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that makes an equal method: `type(method)(**method.config)`."""
        return {name: getattr(self, name) for name in self.options()}

    def present(self, domain: Domain) -> Domain:
        """What the bench shows to this method of a domain, if not just that."""
        return domain

    def files(self) -> dict[str, str]:
        """Digests of the files that its options name, by option: a run is another one if what is in them changes."""
        return {}

    def passes(self) -> tuple[int, int]:
        """Forward and backward passes of an image in a step, at most."""
        return 1, 0

    def receive(self, statistics: SourceStatistics, vit: ViT) -> None:
        """Called before `attach` with the statistics that it `needs`: keep what the steps use, as `source.constants`."""

    def beginnings(self) -> Mapping[str, Tensor]:
        """What its parameters and buffers begin with, by name, where that depends on the statistics that it received.

        A method whose state is read from a file received none: this is called once its constants are known.
        """
        return {}

    def attach(self, vit: ViT, rng: torch.Generator) -> Iterable[nn.Parameter]:
        """Prepare `vit` for adaptation and return the parameters that will change. Draw from `rng` alone."""
        return []

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer | None:
        """The optimizer over those parameters; `batch_size` is that of the stream's first batch."""
        return None

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Predict one batch and learn from it. Change buffers after the gradients are known to be finite."""
        raise NotImplementedError

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Logits without learning: for frozen calls, and for those of after an update. Exchange nothing with other ranks."""
        return engine.predict(images)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())


def scaled_lr(batch_size: int, at_64: float = 0.001) -> float:
    """The learning rate that the field uses for the norms of ViT-B: 0.001 for 64 samples, proportional to the batch."""
    return at_64 * batch_size / 64
