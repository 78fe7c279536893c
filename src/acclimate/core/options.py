"""The options of an adapter that do not depend on the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigError, require_whole
from .engine import PRECISIONS
from .guard import Guard
from .recentre import form_of
from .reply import Budget

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
    recentre: bool | str | None = None
    reply: str = "last"
    budget: str | float | None = None

    def __post_init__(self) -> None:
        if self.predict not in ("before", "after"):
            raise ConfigError(f'predict={self.predict!r}: choose "before" or "after" this batch\'s update.')
        if not (self.guard is None or self.guard == "default" or isinstance(self.guard, Guard)):
            raise ConfigError(f"guard={self.guard!r}: give an acclimate.Guard, or None for no guard.")
        if not isinstance(self.precision, str) or self.precision not in PRECISIONS:
            raise ConfigError(f"precision={self.precision!r}: choose one of {', '.join(PRECISIONS)}.")
        if self.reply not in ("first", "last"):
            raise ConfigError(f'reply={self.reply!r}: choose "first", after one forward pass, or "last", after the step.')
        Budget(self.budget)  # raises an error if there is no such budget
        if self.budget is not None and self.reply != "first":
            raise ConfigError(f'budget={self.budget!r} goes with reply="first".')
        require_whole(0, seed=self.seed)
        form_of(self.recentre, None)  # raises an error if there is no such form
        if not isinstance(self.compile, (bool, str)):
            raise ConfigError(f"compile={self.compile!r}: give True, False, or the name of a backend.")
        if isinstance(self.compile, str) and self.compile not in torch.compiler.list_backends(exclude_tags=()):
            known = ", ".join(torch.compiler.list_backends())
            raise ConfigError(f"compile={self.compile!r}: torch has no such backend. It has {known}.")

    @classmethod
    def from_header(cls, header: Mapping[str, Any], **own: Any) -> Options:
        """Return the options of a state file, and those of this process: `compile`, `reply` and `budget`.

        A file never decides to compile, though old ones say what was compiled.
        """
        guard = header["guard"]
        plain = {name: value for name, value in header.items() if name not in ("compile", "guard")}
        return cls(**plain, guard=None if guard is None else Guard(**guard), **own)

    def new_guard(self) -> Guard | None:
        """Return a new guard, because every adapter needs its own."""
        if self.guard is None:
            return None
        return Guard(**(self.guard.config if isinstance(self.guard, Guard) else {}))

    def header(self, classes: list[int] | None, form: str | None) -> dict[str, Any]:
        """Return the options in the form of a state file.

        Args:
            classes: Checked columns of the head.
            form: The form of recentring.
        """
        guard = self.new_guard()
        return {
            "classes": classes,
            "predict": self.predict,
            "guard": None if guard is None else guard.config,
            "micro_batch": self.micro_batch,
            "precision": self.precision,
            "seed": self.seed,
            "mean": _plain(self.mean),
            "std": _plain(self.std),
            "recentre": form or False,
        }


def _plain(values: float | Sequence[float] | None) -> float | list[float] | None:
    return values if values is None or isinstance(values, (int, float)) else [float(v) for v in values]
