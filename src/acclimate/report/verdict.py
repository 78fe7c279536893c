"""The result of a table in one sentence."""

from __future__ import annotations

from ..data.domains import CLEAN
from ..errors import printable
from ..evaluation.paired import Difference
from ..evaluation.tables import Column, Grid, Summary

MOST = 4  # methods that a clause names; others are counted
BASELINE = "the unadapted model"


def verdict(grid: Grid) -> str | None:
    """Return what the methods of a table gain over the unadapted model, and what they do to clean images.

    The shifts are summarised by the mean of the table, in which clean images have no part. Only what is beyond chance is
    called a gain or a loss. The result is None if the table has no unadapted model, or nothing that can be compared with it.
    """
    clean = next((key for key in grid.domains if key.name == CLEAN), None)
    clauses = []
    if grid.shifts != [clean]:
        several = len(grid.shifts) > 1
        where = f"In the mean of {len(grid.shifts)} shifts" if several else f"Under {grid.heading(grid.shifts[0])}"
        clauses += _clauses(grid, Summary.MEAN, where)
    if clean is not None:
        clauses += _clauses(grid, clean, "on clean images" if clauses else "On clean images")
    if not clauses:
        return None
    first, *others = clauses
    return "; ".join([first, *(clause.replace(BASELINE, "it") for clause in others)]) + "."


def _clauses(grid: Grid, column: Column, where: str) -> list[str]:
    """Return clauses about gains, about differences within chance, and about losses. `where` begins the first one."""
    compared = [(printable(grid.label(row)), grid.gain(row, column)) for row in grid.compared(column)]
    known = [(label, gain) for label, gain in compared if gain is not None and gain.interval is not None]
    gains = [each for each in known if each[1].beyond_chance and each[1].points > 0]
    even = [each for each in known if not each[1].beyond_chance]
    losses = [each for each in known if each[1].beyond_chance and each[1].points < 0]
    clauses = []
    if gains:
        (label, gain), *others = gains
        clauses.append(f"{label} gains {_spaced(gain).lstrip('+')} points over {BASELINE}")
        if others:
            clauses.append(f"{_listed(others)} {'gain' if len(others) > 1 else 'gains'}, too")
    if even:
        clauses.append(f"{_listed(even)} {'do' if len(even) > 1 else 'does'} not differ from {BASELINE} beyond chance")
    if losses:
        clauses.append(f"{_listed(losses)} {'lose' if len(losses) > 1 else 'loses'} against {BASELINE}")
    return [f"{where}, {clauses[0]}", *clauses[1:]] if clauses else []


def _spaced(gain: Difference) -> str:
    return str(gain).replace("±", " ± ")


def _listed(methods: list[tuple[str, Difference]]) -> str:
    """Return methods with their gains in points, as a list in words."""
    shown = [f"{label} ({_spaced(gain)})" for label, gain in methods[:MOST]]
    shown += [f"{len(methods) - MOST} more"] if len(methods) > MOST else []
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
