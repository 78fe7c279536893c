"""`acclimate table`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ._words import Commands, listed, numbers

if TYPE_CHECKING:
    from ..evaluation.store import Outcome

FORMATS = ("terminal", "markdown", "csv", "latex", "json", "html")

EPILOG = """\
examples:
  acclimate table runs/                                   every setting's table
  acclimate table runs/ --setting normal --format latex   the layout of the papers, ready for \\input
  acclimate table runs/ --format html --save table.html   one page with table, curves and costs
  acclimate table runs/ --paper normal                    the paper's numbers beside ours

Results whose protocols differ (weights, normalisation, order of the images, versions ...) are not put into one table unless
--mix says so; what differs is then printed with it.
"""


def add(commands: Commands) -> None:
    table = commands.add_parser(
        "table",
        help="tables of finished runs: for a terminal, Markdown, CSV, LaTeX, JSON, HTML",
        description="Make tables of finished runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    table.add_argument("runs", nargs="+", metavar="DIR", help="folders of `acclimate bench --out`, or of single runs")
    table.add_argument("--format", default="terminal", choices=FORMATS, help="default: %(default)s")
    table.add_argument("--save", metavar="FILE", help="write to a file instead of the screen")
    table.add_argument("--methods", metavar="LIST", help="only these, in this order")
    table.add_argument(
        "--setting", metavar="NAME", help="only this one; needed where there are several, except on a terminal"
    )
    table.add_argument("--severity", type=int, metavar="1..5", help="only this one")
    table.add_argument("--seeds", metavar="LIST", help="only these")
    table.add_argument("--model", metavar="NAME", help="only this one, as it is called in the results")
    table.add_argument(
        "--paper", metavar="TABLE", help="the paper's numbers beside ours; `acclimate paper` lists its tables"
    )
    table.add_argument("--mix", action="store_true", help="put results of different protocols into one table")
    table.add_argument("--title", metavar="TEXT", help="of the LaTeX table or the page")
    table.set_defaults(run=_table)


def _table(given: argparse.Namespace) -> None:
    from pathlib import Path

    from rich.console import Console

    from ..core.files import write_whole
    from ..errors import ConfigError
    from ..evaluation import tables
    from ..evaluation.results import Results
    from ..evaluation.store import Store
    from ..papers.dct.reported import reported

    outcomes = [outcome for folder in given.runs for outcome in Store(folder).outcomes()]
    methods = given.methods and listed("methods", given.methods)
    seeds = given.seeds and numbers("seeds", given.seeds)
    chosen = Results(
        o
        for o in outcomes
        if (methods is None or o.spec.method in methods)
        and (seeds is None or o.spec.seed in seeds)
        and given.setting in (None, o.spec.setting)
        and given.model in (None, o.spec.model["name"])
        and (given.severity is None or all(title.endswith(f"/{given.severity}") for title in o.spec.domains))
    )
    if not len(chosen):
        kept = f"none of the {len(outcomes)} finished runs there is what was asked for" if outcomes else "no finished run"
        raise ConfigError(f"{', '.join(given.runs)}: {kept}.")
    chosen = Results(ordered(chosen, methods))
    grids = chosen.grids(mix=given.mix)
    paper = given.paper and reported(given.paper)
    for grid in grids.values():
        for difference in grid.differences:
            print(f"mixed: {difference}")
    if given.format == "terminal" and not given.save:
        console = Console()
        from .bench import show

        show(chosen, console, mix=given.mix)
        if paper:
            for grid in grids.values():
                console.print(tables.beside(grid, paper))
                for doubt in paper.doubts:
                    console.print(f"doubt: {doubt}", style="yellow")
        return
    if len(grids) > 1:
        raise ConfigError(f"There are results of several settings ({', '.join(grids)}): choose one with --setting.")
    ((setting, grid),) = grids.items()
    title = given.title or f"Top-1 accuracy (%), {setting}, {grid.severities}{grid.model}"
    text = tables.written(given.format, grid, title, paper)
    if given.save:
        write_whole(Path(given.save), text.encode())
        print(f"{given.save}: {len(text.encode())} bytes")
    else:
        print(text)


def ordered(outcomes: Iterable[Outcome], methods: Sequence[str] | None = None) -> list[Outcome]:
    """As a table shows them: methods as they are listed, corruptions as in the papers, seeds."""
    from ..core.registry import list_methods

    order = methods or list_methods()
    return sorted(outcomes, key=lambda o: (order.index(o.spec.method), *map(_place, o.spec.domains), o.spec.seed))


def _place(title: str) -> tuple[int, str]:
    """Corruptions in the papers' order, other domains after them by name."""
    from ..data.corruptions import CORRUPTIONS

    name = title.partition("/")[0]
    return (CORRUPTIONS.index(name) if name in CORRUPTIONS else len(CORRUPTIONS), title)
