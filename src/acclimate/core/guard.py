"""The guard, which watches a run for collapse.

The guard first checks the predictions of the model, which is cheap. But few classes among them do not prove a collapse,
because the images of a stream may all be of one class for a long time. While a run is suspect, the source model therefore
predicts the same images. The adapted model has collapsed only if the source model disagrees with it.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, require_between, require_whole
from .engine import entropy
from .statecheck import COUNT

MOST_PREDICTIONS = 10**6  # in the window, which is part of the state
ENOUGH_ANSWERS = 32  # samples that the source model predicts before a decision


class Guard(nn.Module):
    """The limits of a healthy run, and the action to take when a limit is exceeded.

    No method learns from logits or gradients that are not finite: such a step is skipped. After a collapse, or a drift
    beyond its limit, the adapter returns to the last good snapshot, or to the source model if there is none yet. Then the
    run continues ("rollback"), or adaptation stops until `reset` or `rollback` is called ("freeze").

    Args:
        window: The number of latest predictions that are checked.
        diversity: The effective number of classes among them (the exponential of the entropy of their frequencies), as a
            share of all classes, up to which the run is suspect. With fewer than 200 classes, up to two classes are suspect.
        floor: The mean entropy of the predictions, as a share of ln C for C classes, below which the run is suspect.
        agreement: The share of a suspect run's predictions that the source model must share. Below it, the run has
            collapsed.
        drift: The largest allowed distance from the source parameters, divided by their norm.
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
        require_whole(1, MOST_PREDICTIONS, window=window)
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
        self.ranges = dict.fromkeys(("seen", "asked", "agreed", "since_good"), COUNT)
        for counter in self.ranges:
            self.register_buffer(counter, torch.tensor(0))
        self.register_buffer("stopped", torch.tensor(False))

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that create a guard with the same limits."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def observe(self, logits: Tensor) -> None:
        """Store the predictions of a batch and their entropies in the window."""
        latest = logits[-self.window :]
        where = (int(self.seen) + torch.arange(len(latest), device=self.predictions.device)) % self.window
        self.predictions[where] = latest.argmax(-1).to(self.predictions.device)
        self.entropies[where] = entropy(latest).to(self.entropies)
        self.seen += len(latest)
        self.since_good += len(latest)

    def effective_classes(self, newest: int | None = None) -> float:
        """Return the effective number of classes in the window, or among its `newest` predictions.

        It is the exponential of the entropy of the class frequencies.
        """
        count = newest or self.window
        where = (int(self.seen) - 1 - torch.arange(count, device=self.predictions.device)) % self.window
        share = self.predictions[where].bincount().float() / count
        return float((-torch.xlogy(share, share).sum()).exp())

    def suspect_limit(self, num_classes: int) -> float:
        """Return the effective number of classes up to which a run is suspect.

        If there are only two or three classes in total, it is between one and two.
        """
        return min(max(2.0, self.diversity * num_classes), 1 + 0.2 * (num_classes - 1))

    def suspects(self, num_classes: int) -> bool:
        """Return whether the predictions in the window suggest a collapse."""
        if int(self.seen) < self.window:
            return False
        low = float(self.entropies.mean()) < self.floor * math.log(num_classes)
        return low or self.effective_classes() <= self.suspect_limit(num_classes)

    def collapsed(self, agrees: Tensor) -> bool:
        """Return whether the run has collapsed, given the samples of a suspect batch on which the source model agrees.

        No decision is made before the source model has predicted `ENOUGH_ANSWERS` samples. After a decision all counts start
        again.
        """
        self.asked += len(agrees)
        self.agreed += int(agrees.sum())
        if int(self.asked) < ENOUGH_ANSWERS:
            return False
        guilty = int(self.agreed) < self.agreement * int(self.asked)
        self.forget()
        return guilty

    def forget(self) -> None:
        """Clear the window and all counts."""
        for counter in (self.seen, self.asked, self.agreed, self.since_good):
            counter.zero_()

    def snapshot_due(self, num_classes: int) -> bool:
        """Return whether it is time for a good snapshot.

        It is if a full window has passed since the last one, and the predictions are spread over enough classes, in the
        whole window and in its newest quarter.
        """
        if int(self.since_good) < self.window:
            return False
        few = self.suspect_limit(num_classes)
        enough = min(2 * few, (few + num_classes) / 2)
        if min(self.effective_classes(), self.effective_classes(max(1, self.window // 4))) < enough:
            return False
        self.since_good.zero_()
        return True

    def extra_repr(self) -> str:
        """Return the limits, for `repr`."""
        return ", ".join(f"{name}={value!r}" for name, value in self.config.items())
