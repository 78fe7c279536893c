"""Testing by betting: evidence against a claim about a stream of numbers, with a bound on the probability of a false alarm.

A gambler who bets on a claim that is false makes money, and one who bets on a true claim does not. The wealth is therefore
evidence, at any time and without a fixed number of observations (Shafer and Vovk; Waudby-Smith and Ramdas).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .statecheck import Range

FRACTIONS = (0.1, 0.2, 0.4, 0.8)  # of the wealth at stake; several gamblers, because the best one is not known
HORIZON = 1024  # observations in which the gamblers get as much money again as they had at first


class Wealth(nn.Module):
    """The wealth of gamblers who bet that numbers between -1 and 1 are negative in the mean.

    Each of them begins with one unit, stakes a fixed fraction of the wealth on every number, and gets a small income, so
    that a change is also found after a long time without one. If the mean of each number, given the earlier ones, is not
    negative, the probability that the mean wealth ever reaches 1/a within n numbers is at most a (1 + n / HORIZON): without
    the income the wealth is a supermartingale (Ville's inequality).
    """

    ranges: Mapping[str, Range] = {"stakes": (0, math.inf)}

    def __init__(self) -> None:
        super().__init__()
        self.stakes: Tensor
        self.register_buffer("stakes", torch.ones(len(FRACTIONS)))

    def bet(self, number: float) -> None:
        """Let all gamblers bet on one number, and add the income."""
        bounded = min(1.0, max(-1.0, number))
        fractions = self.stakes.new_tensor(FRACTIONS)
        self.stakes.add_(1 / HORIZON).mul_(1 - fractions * bounded)

    @property
    def mean(self) -> float:
        """The mean wealth of the gamblers."""
        return float(self.stakes.mean())

    def restart(self) -> None:
        """Give every gambler one unit again."""
        self.stakes.fill_(1)
