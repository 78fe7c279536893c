"""The contract that a test-time adaptation method keeps.

A method is a `torch.nn.Module`. What it learns is a parameter, what it remembers is a buffer, the rest is optimizer state;
so reset, snapshot, save and rollback are written once, in the adapter. Its constructor is its configuration: typed keyword
arguments with the paper's defaults, each stored under its own name. What it is and needs is declared in `info`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..models.view import ViT
from .engine import Engine

if TYPE_CHECKING:
    from .statistics import SourceStatistics


@dataclass
class Step:
    """What a method's step returns: its prediction, and what it did to make or to follow it."""

    logits: Tensor  # or what stands for them: its softmax is taken as the prediction
    used: int = 0  # samples that it learned from
    loss: float | None = None
    recovery: float | None = None  # moving average that triggers a recovery, for methods that have one
    event: str | None = None


@dataclass(frozen=True)
class Info:
    """What a method is, what it needs, and what it costs. A method whose options change one of these replaces its own.

    Args:
        paper: Authors, venue and year.
        adapts: What it changes, in a few words.
        remembers: What it keeps from step to step, beside what adapts.
        needs: Kinds of source statistics that it cannot do without.
        augments: Whether it uses `engine.to_pixels`. A model whose normalisation is not known is then refused when it is
            wrapped.
        passes: Forward and backward passes of an image in a step, at most.
        views: Images that make up one sample. Where it is not 1, a batch is (batch, views, channels, height, width).
        predicts_after: Whether the logits of a step come from after its update in any case.
        updates_once: Whether nothing can fail after a step's first update. Otherwise the adapter keeps a copy of the state
            during a step.
        far_from_source: Whether its parameters go far from the source values on purpose. That distance is then no sign of a
            collapse.
        quick: Options with which the conformance suite runs, where the defaults would take it long.
        exceptions: Checks of the conformance suite that it cannot meet, each with the reason.
    """

    paper: str = ""
    adapts: str = "nothing"
    remembers: str = "nothing"
    needs: tuple[str, ...] = ()
    augments: bool = False
    passes: tuple[int, int] = (1, 0)
    views: int = 1
    predicts_after: bool = False
    updates_once: bool = True
    far_from_source: bool = False
    quick: Mapping[str, Any] = field(default_factory=dict)
    exceptions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """What a method may use when it is attached to a model.

    Args:
        rng: The generator of all random numbers.
        statistics: The source statistics, for a method that needs some.
    """

    rng: torch.Generator
    statistics: SourceStatistics | None = None

    def statistics_of(self, kind: str) -> dict[str, Tensor]:
        """Return the source statistics of one kind, by name."""
        assert self.statistics is not None, "the adapter refuses a method without the statistics that it needs"
        return self.statistics.of(kind)


class Method(nn.Module):
    """The base class of all methods.

    Subclass it, decorate the class with `acclimate.register("name")`, and run `acclimate.check_method("name")`.
    """

    name: ClassVar[str] = ""
    info: Info = Info()

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """Return the constructor's keyword arguments."""
        parameters = inspect.signature(cls.__init__, eval_str=False).parameters
        return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that makes an equal method: `type(method)(**method.config)`."""
        return {name: getattr(self, name) for name in self.options()}

    def attach(self, vit: ViT, setup: Setup) -> Iterable[nn.Parameter]:
        """Prepare a model for adaptation, and return the parameters that will change. Draw from `setup.rng` alone."""
        return []

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer | None:
        """Return the optimizer over those parameters, with the learning rates for batches of this size.

        Where the size of the batches changes, this is called again for its learning rates.
        """
        return None

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Predict one batch and learn from it. Change buffers after the gradients are known to be finite."""
        raise NotImplementedError

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Return logits without learning, for frozen calls and after an update. Exchange nothing with other ranks."""
        return engine.predict(images)

    def extra_repr(self) -> str:
        """Return the configuration, for `repr`."""
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())


def scaled_lr(batch_size: int, at_64: float = 0.001) -> float:
    """Return the learning rate that the field uses for the norms of ViT-B, which is proportional to the batch size."""
    return at_64 * batch_size / 64
