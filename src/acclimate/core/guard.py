"""Watches a run for collapse.

Suspicion is cheap: it looks at what the model predicts. A stream may well show one class for an hour, so a verdict needs
more: while a run is suspect, the source model is asked about the same images, and only if it no longer agrees has the
adapted model collapsed.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, require_between
from .engine import entropy

ENOUGH_ANSWERS = 32  # samples the source model is asked about before a verdict


class Guard(nn.Module):
    """Limits of a healthy run, and what to do when one is passed.

    Logits or a gradient that are not finite are never learned from: that step is skipped. A collapse, or a drift beyond its
    limit, brings back the last good snapshot, or the source if there is none yet; then the run goes on ("rollback") or
    adaptation stops until `reset` or `rollback` is called ("freeze").

    Args:
        window: How many of the latest predictions are looked at.
        diversity: Effective number of classes among them (the exponential of their entropy), as a share of all classes, up
            to which the run is suspect; with less than 200 classes, two are suspect.
        floor: Mean entropy of the predictions, as a share of ln C, below which the run is suspect.
        agreement: Share of a suspect run's predictions that the source model has to share, or else it has collapsed.
        drift: Largest distance from the source parameters, relative to their length.
        action: "rollback" or "freeze".
    """

    def __init__(
        self,
        *,
        window: int = 512,
        diversity: float = 0.01,
        floor: float = 0.002,
        agreement: float = 0.2,
        drift: float = 3.0,
        action: str = "rollback",
    ) -> None:
        super().__init__()
        if action not in ("rollback", "freeze"):
            raise ConfigError(f'action={action!r}: choose "rollback" or "freeze".')
        require_between(1, math.inf, window=window)
        require_between(0, 1, diversity=diversity, floor=floor, agreement=agreement)
        require_between(0, math.inf, drift=drift)
        self.window = window
        self.diversity = diversity
        self.floor = floor
        self.agreement = agreement
        self.drift = drift
        self.action = action
        self.predictions: Tensor
        self.entropies: Tensor
        self.seen: Tensor
        self.asked: Tensor
        self.agreed: Tensor
        self.since_good: Tensor
        self.stopped: Tensor
        self.register_buffer("predictions", torch.zeros(window, dtype=torch.long))
        self.register_buffer("entropies", torch.zeros(window))
        for counter in ("seen", "asked", "agreed", "since_good"):
            self.register_buffer(counter, torch.tensor(0))
        self.register_buffer("stopped", torch.tensor(False))

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that make an equal guard, with nothing seen yet."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def observe(self, logits: Tensor) -> None:
        """Remember the predictions of a batch."""
        latest = logits[-self.window :]
        where = (int(self.seen) + torch.arange(len(latest), device=self.predictions.device)) % self.window
        self.predictions[where] = latest.argmax(-1).to(self.predictions.device)
        self.entropies[where] = entropy(latest).to(self.entropies)
        self.seen += len(latest)
        self.since_good += len(latest)

    def effective_classes(self, newest: int | None = None) -> float:
        """How many classes the window, or its newest part, would be spread over if all were equally frequent."""
        count = newest or self.window
        where = (int(self.seen) - 1 - torch.arange(count, device=self.predictions.device)) % self.window
        share = self.predictions[where].bincount().float() / count
        return float((-torch.xlogy(share, share).sum()).exp())

    def few(self, num_classes: int) -> float:
        """So few effective classes are suspect; of two or three classes in all, one is."""
        return min(max(2.0, self.diversity * num_classes), 1 + 0.2 * (num_classes - 1))

    def suspects(self, num_classes: int) -> bool:
        if int(self.seen) < self.window:
            return False
        low = float(self.entropies.mean()) < self.floor * math.log(num_classes)
        return low or self.effective_classes() <= self.few(num_classes)

    def collapsed(self, agrees: Tensor) -> bool:
        """Add the source model's answers about a suspect batch; True when they convict, and the case starts afresh."""
        self.asked += len(agrees)
        self.agreed += int(agrees.sum())
        if int(self.asked) < ENOUGH_ANSWERS:
            return False
        guilty = int(self.agreed) < self.agreement * int(self.asked)
        self.forget()
        return guilty

    def forget(self) -> None:
        """Start with an empty window."""
        for counter in (self.seen, self.asked, self.agreed, self.since_good):
            counter.zero_()

    def good(self, num_classes: int) -> bool:
        """Whether a window has passed since the last good snapshot, well spread over the classes to its very end."""
        if int(self.since_good) < self.window:
            return False
        few = self.few(num_classes)
        enough = min(2 * few, (few + num_classes) / 2)
        if min(self.effective_classes(), self.effective_classes(max(1, self.window // 4))) < enough:
            return False
        self.since_good.zero_()
        return True

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())
