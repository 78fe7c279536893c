"""The tables of a bench on a terminal, with remarks about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from ..evaluation.formats import terminal
from ..evaluation.results import Results
from ..evaluation.tables import SOURCE, Grid
from .verdict import verdict


def show(
    results: Results,
    console: Console,
    *,
    mix: bool = False,
    remarks: Callable[[Grid], Sequence[str]] = lambda grid: (),
) -> None:
    """Print a table for each setting with its result in one sentence, and the events of the runs.

    Args:
        results: The results of the runs.
        console: The console to print to.
        mix: Whether to include runs whose protocols differ.
        remarks: A function that returns sentences about a table. For example, `papers.dct.protocols.source_remarks` states
            whose protocol it resembles.
    """
    for grid in results.grids(mix=mix).values():
        samples = sorted({outcome.result.samples for outcome in grid.outcomes})
        count = " to ".join(str(number) for number in dict.fromkeys((samples[0], samples[-1])))
        title = f"Top-1 accuracy in %: {grid.scope}, {count} images a stream, model {grid.model}"
        console.print(terminal(grid, title, width=console.width))
        if sentence := verdict(grid):
            console.print(sentence, style="bold", markup=False, emoji=False)
        for remark in remarks(grid):
            style = "bold yellow" if remark.startswith("Warning") else "dim"
            console.print(remark, style=style, markup=False, emoji=False)
    for spec, events in ((outcome.spec, outcome.result.events) for outcome in results):
        if events and spec.method != SOURCE:
            (step, event), where = events[0], ", ".join(map(str, spec.domains[:2]))
            count = f"{len(events)} events" if len(events) > 1 else "1 event"
            told = f"{spec.method} on {where}: {count}, first at step {step}: {event}"
            console.print(told, style="yellow", markup=False, emoji=False)  # names may contain brackets and colons
