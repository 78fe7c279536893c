"""A bank of features and predictions, in which the nearest neighbours of a sample vote for its label."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.statecheck import COUNT
from ..models.view import ModelView


class Bank(nn.Module):
    """The features and predictions of the last `size` samples.

    A target domain may have fewer classes than the head. Then only the first columns of the predictions are used.

    Args:
        size: The number of samples that the bank holds.
        view: The model. Features are the input of its head.
        lagging: Behave as a bank that grows by appending whole batches. It may then hold somewhat more samples than `size`,
            and its pointer is one batch behind: the newest samples are the first to be replaced.
    """

    def __init__(self, size: int, view: ModelView, *, lagging: bool = False) -> None:
        super().__init__()
        self.size = size
        self.lagging = lagging
        self.features: Tensor
        self.probabilities: Tensor
        self.at: Tensor
        self.seen: Tensor
        places = 2 * size - 1 if lagging else size
        like = torch.zeros(0, dtype=view.precise, device=view.device)
        self.register_buffer("features", like.new_zeros(places, view.feature_width))
        self.register_buffer("probabilities", like.new_zeros(places, view.classes))
        self.register_buffer("at", torch.tensor(0))  # index of the next entry
        self.register_buffer("seen", torch.tensor(0))  # number of samples so far
        self.ranges = {"at": (0, places), "seen": COUNT, "grown": (0, places)}
        if lagging:
            self.grown: Tensor
            self.register_buffer("grown", torch.tensor(0))  # number of entries that are filled

    @property
    def held(self) -> int:
        """The number of entries that are filled."""
        return int(self.grown) if self.lagging else min(int(self.seen), self.size)

    def labels(self, logits: Tensor, features: Tensor, *, neighbours: int, after: int) -> Tensor:
        """Return the labels that the nearest neighbours vote for.

        Until `after` samples were seen, return the predicted labels instead.
        """
        held = self.held
        if int(self.seen) < after or not held:
            return logits.argmax(-1)
        bank = F.normalize(self.features[:held], dim=-1)
        nearest = (F.normalize(features, dim=-1).to(bank) @ bank.T).topk(min(neighbours, held)).indices
        return self.probabilities[:, : logits.shape[-1]][nearest].mean(1).argmax(-1)

    def remember(self, features: Tensor, probabilities: Tensor) -> None:
        """Store a batch in the bank; when the bank is full, earlier entries are replaced."""
        count, held = len(features), self.held
        places, start = self.size, int(self.at)
        if self.lagging:
            places, start = (held + min(count, self.size), held) if held < self.size else (held, start)
            self.grown.fill_(places)
        entries = ring(start, count, places)
        self.features[entries] = features[-len(entries) :].to(self.features)
        self.probabilities[entries, : probabilities.shape[-1]] = probabilities[-len(entries) :].to(self.features)
        self.at.fill_((int(self.at) + count) % places)
        self.seen += count


def ring(start: int, count: int, size: int) -> Tensor:
    """Return the indices at which `count` new entries are stored in a ring buffer.

    If there are more new entries than the buffer holds, only the last ones are stored.
    """
    kept = min(count, size)
    return (start + count - kept + torch.arange(kept)) % size
