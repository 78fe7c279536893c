"""Scores of the predictions of a run, per image and in total."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..data.domains import DomainKey
from ..errors import InputError
from .paired import pack_counts

Floats = npt.NDArray[np.float64]
BINS = 15  # of the calibration error, as in Guo et al. (2017)


class Scores:
    """A collection of scored predictions of a stream.

    Args:
        classes: The number of logits.
        domains: The keys of the domains of the stream.
        unknown: The label of images of no class, for which any prediction is wrong; None if there are none.
    """

    def __init__(self, classes: int, domains: Sequence[DomainKey], *, unknown: int | None = None) -> None:
        self.classes, self.domains, self.unknown = classes, list(domains), unknown
        self.count = self.right = 0  # number of images so far, and of correct predictions
        self._rows: list[Floats] = []
        self._stacked: Floats | None = None

    def add(self, logits: Tensor, labels: Tensor, domain: Tensor) -> None:
        """Score one batch, given logits (batch, classes), labels (batch,) and positions in `domains` (batch,)."""
        if logits.shape != (len(labels), self.classes):
            raise InputError(f"logits {tuple(logits.shape)} for {len(labels)} labels and {self.classes} classes do not fit.")
        labels = labels.to(logits.device)
        nobody = torch.zeros_like(labels, dtype=torch.bool) if self.unknown is None else labels == self.unknown
        wrong = ((labels < 0) | (labels >= self.classes)) & ~nobody
        if wrong.any():
            raise InputError(
                f"the label {int(labels[wrong][0])} is outside the model's classes, 0 to {self.classes - 1}: is this the "
                "model of this data set, and are its classes numbered alike?"
            )
        finite = logits.isfinite().all(-1)  # logits that are not finite count as wrong, whatever their argmax is
        log_p = logits.double().log_softmax(-1)
        best = logits.topk(min(5, self.classes)).indices == labels[:, None]
        confidence = log_p.max(-1).values.exp().where(finite, 1.0)
        nll = -log_p.gather(1, labels.where(~nobody, 0)[:, None])[:, 0].where(finite, -math.inf).where(~nobody, math.nan)
        row = [best[:, 0] & finite, best.any(-1) & finite, confidence, nll, domain.to(logits.device)]
        self.extend(torch.stack([column.double() for column in row]).cpu().numpy())

    def extend(self, rows: Floats) -> None:
        """Add a batch that was already scored, in the form of `last`."""
        self._rows.append(rows)
        self._stacked = None
        self.count += rows.shape[1]
        self.right += int(rows[0].sum())

    @property
    def last(self) -> Floats:
        """The scores of the latest batch, (5, batch).

        The rows are: top-1, top-5, confidence, negative log-likelihood, and domain.
        """
        return self._rows[-1]

    def _column(self, number: int) -> Floats:
        if not self._rows:
            raise InputError("There is no score yet: no batch was added.")
        if self._stacked is None:
            self._stacked = np.concatenate(self._rows, axis=1)
        return self._stacked[number]

    @property
    def digest(self) -> str:
        """The SHA-256 of the scores of all images, in order."""
        self._column(0)
        return hashlib.sha256(np.ascontiguousarray(self._stacked, "<f8").data).hexdigest()

    @property
    def top1(self) -> float:
        """The share of images whose most likely class is correct."""
        return float(self._column(0).mean())  # instead of right / count, which would not raise the error for no scores

    @property
    def top5(self) -> float:
        """The share of images whose class is among the five most likely ones."""
        return float(self._column(1).mean())

    @property
    def second_half(self) -> float:
        """The mean over domains of the top-1 on the second half of the images of each domain."""
        domain, right = self._column(4), self._column(0)
        each = [right[domain == i] for i in np.unique(domain)]
        return float(np.mean([mine[len(mine) // 2 :].mean() for mine in each]))

    @property
    def per_domain(self) -> dict[DomainKey, float]:
        """The top-1 of each domain that occurred."""
        domain = self._column(4)
        return {k: float(self._column(0)[domain == i].mean()) for i, k in enumerate(self.domains) if (domain == i).any()}

    def by_image(self, order: npt.NDArray[np.int64], sizes: Sequence[int]) -> dict[DomainKey, str]:
        """Return the counts of `pack_counts` for each domain that occurred.

        Args:
            order: The positions of the images of the stream in the list of the images of all domains.
            sizes: The number of images of each domain.
        """
        domain, starts = self._column(4), np.cumsum([0, *sizes])
        mine = {i: domain == i for i in range(len(sizes))}
        return {
            self.domains[i]: pack_counts(self._column(0)[met], order[met] - starts[i], sizes[i])
            for i, met in mine.items()
            if met.any()
        }

    @property
    def mean(self) -> float:
        """The mean of the top-1 of all domains, with equal weights."""
        return float(np.mean(list(self.per_domain.values())))

    @property
    def nll(self) -> float:
        """The mean negative log-likelihood of the correct class, in nats.

        It is infinite if a prediction was not finite. Images of no class are not counted.
        """
        nll = self._column(3)
        known = nll[~np.isnan(nll)]
        return float(known.mean()) if len(known) else math.inf

    @property
    def ece(self) -> float:
        """The expected calibration error: the mean gap between confidence and accuracy over 15 bins of equal width."""
        confidence, right = self._column(2), self._column(0)
        which = np.minimum(np.ceil(confidence * BINS).astype(int), BINS)
        gaps = np.bincount(which, confidence - right, minlength=BINS + 1)
        return float(np.abs(gaps).sum() / len(right))

    def running(self, points: int = 100) -> tuple[npt.NDArray[np.int64], Floats]:
        """Return up to `points` numbers of images, and the top-1 over the stream up to each."""
        where = np.unique(np.linspace(1, self.count, min(points, self.count)).round().astype(np.int64))
        return where, (self._column(0).cumsum() / np.arange(1, self.count + 1))[where - 1]
