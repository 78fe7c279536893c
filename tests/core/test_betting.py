"""The wealth grows on evidence, and false alarms are as rare as promised."""

from __future__ import annotations

import math
import random

import pytest

from acclimate.core.betting import FRACTIONS, HORIZON, Wealth


def test_wealth_is_the_mean_of_what_each_gambler_has():
    wealth = Wealth()
    stakes = [1.0] * len(FRACTIONS)
    for number in (-0.5, 0.25, -1.0):
        wealth.bet(number)
        stakes = [(have + 1 / HORIZON) * (1 - fraction * number) for have, fraction in zip(stakes, FRACTIONS)]
    assert wealth.mean == pytest.approx(sum(stakes) / len(stakes), rel=1e-6)
    wealth.restart()
    assert wealth.mean == 1


def test_numbers_outside_of_the_range_count_as_its_ends():
    one, other = Wealth(), Wealth()
    one.bet(-40.0)
    other.bet(-1.0)
    assert one.mean == other.mean


def reached(mean: float, deviation: float, seed: int, count: int) -> int | None:
    """The number of observations until the wealth is 20, if it gets there."""
    rng, wealth = random.Random(seed), Wealth()
    for i in range(count):
        wealth.bet(mean + rng.choice((-1, 1)) * deviation)
        if wealth.mean >= 20:
            return i + 1
    return None


def test_false_alarms_are_as_rare_as_promised():
    """Fair numbers, 400 streams of 256: at most 0.05 * 1.25 of them, and three standard errors more."""
    alarms = sum(reached(0.0, 0.5, seed, 256) is not None for seed in range(400))
    promised = 0.05 * (1 + 256 / HORIZON)
    assert alarms <= 400 * (promised + 3 * math.sqrt(promised / 400))


def test_a_negative_mean_is_found():
    assert all((reached(-0.3, 0.5, seed, 256) or 999) < 100 for seed in range(20))


def test_a_change_is_found_after_a_long_time_without_one():
    wealth = Wealth()
    for _ in range(5000):
        wealth.bet(0.3)
    needed = 0
    while wealth.mean < 20 and needed < 100:
        wealth.bet(-0.5)
        needed += 1
    assert needed < 60
