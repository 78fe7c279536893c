"""The options of an adapter that do not depend on the method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ..errors import ConfigError
from .guard import Guard

COST_ONLY = {"micro_batch", "compile"}  # options that change the cost of a run, and the result only by rounding


@dataclass(frozen=True)
class Options:
    """The options of an adapter that all methods share. `acclimate.adapt` explains each of them."""

    classes: Sequence[int] | Tensor | None = None
    predict: str = "before"
    guard: Guard | Literal["default"] | None = "default"
    micro_batch: int | None = None
    precision: str = "float32"
    compile: bool | str = False
    seed: int = 0
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.predict not in ("before", "after"):
            raise ConfigError(f'predict={self.predict!r}: choose "before" or "after" this batch\'s update.')
        if not (self.guard is None or self.guard == "default" or isinstance(self.guard, Guard)):
            raise ConfigError(f"guard={self.guard!r}: give an acclimate.Guard, or None for no guard.")

    def new_guard(self) -> Guard | None:
        """Return a new guard, because every adapter needs its own."""
        if self.guard is None:
            return None
        return Guard(**(self.guard.config if isinstance(self.guard, Guard) else {}))

    def header(self, classes: list[int] | None) -> dict[str, Any]:
        """Return the options in the form of a state file, with `classes` as checked columns of the head."""
        guard = self.new_guard()
        return {
            "classes": classes,
            "predict": self.predict,
            "guard": None if guard is None else guard.config,
            "micro_batch": self.micro_batch,
            "precision": self.precision,
            "compile": self.compile,
            "seed": self.seed,
            "mean": _plain(self.mean),
            "std": _plain(self.std),
        }


def _plain(values: float | Sequence[float] | None) -> float | list[float] | None:
    return values if values is None or isinstance(values, (int, float)) else [float(v) for v in values]
