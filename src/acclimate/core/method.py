"""The contract of a test-time adaptation method.

A method is a `torch.nn.Module`. The tensors that it learns are parameters, and those that it remembers are buffers;
everything else is state of the optimizer. Therefore the adapter can implement reset, snapshot, save and rollback for all
methods. The constructor is the configuration: typed keyword arguments with the defaults of the paper, each stored under its
own name. The class attribute `info` declares what the method is and what it needs.

A state file is refused if a buffer in it has values outside of its range in `ranges`, or if it has NaN or infinity that its
initial value does not have.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..models.view import ModelView
from .engine import Engine
from .statecheck import Range

if TYPE_CHECKING:
    from .statistics import SourceStatistics


@dataclass
class Step:
    """The result of one step of a method: its prediction, and what it learned."""

    logits: Tensor  # or equivalent values, whose softmax is the prediction
    used: int = 0  # samples that the method learned from
    loss: float | None = None
    recovery: float | None = None  # moving average that triggers a recovery, if the method has one
    event: str | None = None


@dataclass(frozen=True)
class Info:
    """The description of a method: what it is, what it needs, and what it costs.

    A method whose options change one of these replaces its own `info`.

    Args:
        paper: Authors, venue and year.
        adapts: What the method changes, in a few words.
        requires: The parts that a model must have, of `models.view.PARTS`. A method without any takes every module that
            returns logits.
        batch_statistics: Whether BatchNorm layers normalise with the statistics of each batch, and not of the source data.
        remembers: What it keeps from step to step, in addition to what adapts.
        needs: The kinds of source statistics that it requires.
        augments: Whether it uses `engine.to_pixels`. If so, a model whose normalisation is not known cannot be wrapped.
        passes: The largest number of forward and backward passes of an image in a step.
        views: The number of images that make up one sample. If it is not 1, a batch is (batch, views, channels, height,
            width).
        predicts_after: Whether the logits of a step always come from after its update.
        replies_first: Whether the logits of a step are always those of its first pass of the whole batch, so that a caller
            can have them before the step ends (`adapt(reply="first")`).
        float16: Whether weights in float16 can adapt. The squared gradients of Adam are too small for that type.
        far_from_source: Whether the method moves its parameters far from the source values on purpose. If so, a large drift
            is no sign of a collapse.
        recentre: The form of recentring that the method uses by default; None for none.
        quick: Options that the conformance suite uses if the defaults would take long, or do not suit its tiny models.
        exceptions: Checks of the conformance suite that the method cannot pass, each with the reason.
    """

    paper: str = ""
    adapts: str = "nothing"
    requires: tuple[str, ...] = ()
    batch_statistics: bool = False
    remembers: str = "nothing"
    needs: tuple[str, ...] = ()
    augments: bool = False
    passes: tuple[int, int] = (1, 0)
    views: int = 1
    predicts_after: bool = False
    replies_first: bool = False
    float16: bool = True
    far_from_source: bool = False
    recentre: str | None = None
    quick: Mapping[str, Any] = field(default_factory=dict)
    exceptions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """The objects that a method may use when it is attached to a model.

    Args:
        rng: The generator of all random numbers.
        statistics: The source statistics, for a method that needs some.
        classes: Columns of the head that exist in the target domain; None for all of them.
    """

    rng: torch.Generator
    statistics: SourceStatistics | None = None
    classes: list[int] | None = None

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
    ranges: Mapping[str, Range] = {}  # the smallest and the largest valid value of some buffers, by name

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """Return the keyword arguments of the constructor."""
        parameters = inspect.signature(cls.__init__, eval_str=False).parameters
        return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that creates an equal method: `type(method)(**method.config)`."""
        return {name: getattr(self, name) for name in self.options()}

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Prepare a model for adaptation, and return the parameters that will adapt.

        Random numbers must be drawn from `setup.rng` only.
        """
        return []

    def optimizer(self, batch_size: int) -> torch.optim.Optimizer | None:
        """Return the optimizer of the adapted parameters, with learning rates for batches of this size.

        If the batch size changes, the adapter calls this method again to get the new learning rates.
        """
        return None

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Predict one batch and learn from it.

        Buffers must be changed only when the gradients are known to be finite.
        """
        raise NotImplementedError

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Return logits without learning, for frozen calls and for predictions after an update.

        This method must not exchange anything with other ranks.
        """
        return engine.predict(images)

    def extra_repr(self) -> str:
        """Return the configuration, for `repr`."""
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())


RESNET_LR = 0.00025  # of TENT, EATA, SAR and DeYO for the norms of ResNet-50, at a batch of 64


def lr_of_norms(view: ModelView, layer: float) -> float:
    """Return the learning rate of the norms of a model for a batch of 64, where that of LayerNorm is `layer`."""
    return layer if view.kind_of_norm == "layer" else RESNET_LR


def scaled_lr(batch_size: int, at_64: float = 0.001) -> float:
    """Return the learning rate for the norms of ViT-B, which is proportional to the batch size.

    The default is the usual value of the literature.
    """
    return at_64 * batch_size / 64
