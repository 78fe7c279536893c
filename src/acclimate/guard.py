"""Watches a run for collapse.

Suspicion is cheap: it looks at what the model predicts. A stream may well show one class for an hour, so a verdict needs
more: while a run is suspect, the source model is asked about the same images, and only if it no longer agrees has the
adapted model collapsed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .engine import entropy
from .errors import ConfigError

ENOUGH_ANSWERS = 32  # samples the source model is asked about before a verdict


class Guard(nn.Module):
    """Limits of a healthy run, and what to do when one is passed.

    A gradient that is not finite is never applied: that step is skipped. A collapse, or a drift beyond its limit, brings
    back the last good snapshot ("rollback") or stops adaptation until `reset` or `rollback` is called ("freeze").

    Args:
        window: How many of the latest predictions are looked at.
        dominance: Share of the window on one class from which the run is suspect.
        floor: Mean entropy of the window, as a share of ln C, below which the run is suspect.
        agreement: Share of a suspect run's predictions that the source model has to share, or else it has collapsed.
        drift: Largest distance from the source parameters, relative to their length.
        action: "rollback" or "freeze".
    """

    def __init__(
        self,
        *,
        window: int = 512,
        dominance: float = 0.9,
        floor: float = 0.002,
        agreement: float = 0.5,
        drift: float = 3.0,
        action: str = "rollback",
    ) -> None:
        super().__init__()
        if action not in ("rollback", "freeze"):
            raise ConfigError(f'Guard(action={action!r}): choose "rollback" or "freeze".')
        self.config: dict[str, Any] = {
            "window": window,
            "dominance": dominance,
            "floor": floor,
            "agreement": agreement,
            "drift": drift,
            "action": action,
        }
        self.window = window
        self.dominance = dominance
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

    def observe(self, logits: Tensor) -> None:
        """Remember the predictions of a batch."""
        latest = logits[-self.window :]
        where = (int(self.seen) + torch.arange(len(latest), device=self.predictions.device)) % self.window
        self.predictions[where] = latest.argmax(-1).to(self.predictions.device)
        self.entropies[where] = entropy(latest).to(self.entropies)
        self.seen += len(latest)
        self.since_good += len(latest)

    def largest_share(self) -> float:
        """Share of the window on its most frequent class."""
        return float(self.predictions.bincount().max()) / self.window

    def suspects(self, num_classes: int) -> bool:
        if int(self.seen) < self.window:
            return False
        low = float(self.entropies.mean()) < self.floor * math.log(num_classes)
        return low or self.largest_share() >= self.dominance

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
        """Whether a window has passed since the last good snapshot, and the latest one is well spread over the classes."""
        if int(self.since_good) < self.window or self.largest_share() > (self.dominance + 1 / num_classes) / 2:
            return False
        self.since_good.zero_()
        return True

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())
