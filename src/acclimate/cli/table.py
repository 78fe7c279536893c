"""The command `acclimate table`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ._arguments import SEVERITY, Commands, new_command
from ._parser import list_of, output_file, seed, words

if TYPE_CHECKING:
    from ..evaluation.published import PublishedTable
    from ..evaluation.results import Results
    from ..evaluation.tables import Grid

POSITION = 20
FORMATS = ("terminal", "markdown", "csv", "latex", "json", "html")
EPILOG = """\
examples:
  acclimate table runs/                                   every setting's table
  acclimate table runs/ --settings normal --format latex  the layout of the papers, ready for \\input
  acclimate table runs/ --format html --out table.html    one page with table, curves and costs
  acclimate table runs/ --paper normal                    the paper's numbers beside ours

Results whose protocols differ (weights, normalisation, order of the images, versions ...) are not put into one table unless
--mix says so; what differs is then printed with it. The same holds for a table of the paper that is of other data, another
severity or another setting.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    table = new_command(
        commands,
        "table",
        help="tables of finished runs: for a terminal, Markdown, CSV, LaTeX, JSON, HTML",
        description="Make tables of finished runs.",
        epilog=EPILOG,
    )
    add_runs(table)
    table.add_argument("--format", default="terminal", choices=FORMATS, help="default: %(default)s")
    table.add_argument("--out", type=output_file, metavar="FILE", help="write to a file instead of the screen")
    table.set_defaults(run=_table)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose finished runs, and how to show them."""
    parser.add_argument("runs", nargs="+", metavar="DIR", help="folders of `acclimate bench --out`, or of single runs")
    parser.add_argument("--methods", type=words, metavar="LIST", help="only these, in this order")
    parser.add_argument(
        "--settings",
        "--setting",
        type=words,
        metavar="LIST",
        help="only these; only a terminal shows several",
    )
    parser.add_argument("--severities", "--severity", type=list_of(SEVERITY), metavar="LIST", help="only these")
    parser.add_argument("--seeds", type=list_of(seed), metavar="LIST", help="only these")
    parser.add_argument("--model", metavar="NAME", help="only this one, as it is called in the results")
    parser.add_argument(
        "--paper", metavar="TABLE", help="the paper's numbers beside ours; `acclimate paper` lists its tables"
    )
    parser.add_argument("--mix", action="store_true", help="put what was made under different protocols into one table")
    parser.add_argument("--title", metavar="TEXT", help="of the LaTeX table or the page")


def chosen_runs(given: argparse.Namespace) -> Results:
    """Return the finished runs that the arguments select, in the order of a table."""
    from ..errors import ConfigError
    from ..evaluation.results import Results
    from ..evaluation.store import Store

    outcomes = [outcome for folder in given.runs for outcome in Store(folder).outcomes()]
    methods, settings, severities, seeds = given.methods, given.settings, given.severities, given.seeds
    chosen = Results(
        o
        for o in outcomes
        if (methods is None or o.spec.method in methods)
        and (settings is None or o.spec.setting in settings)
        and (severities is None or all(key.severity in severities for key in o.spec.domains))
        and (seeds is None or o.spec.seed in seeds)
        and given.model in (None, o.spec.model["name"])
    )
    if not len(chosen):
        kept = f"none of the {len(outcomes)} finished runs there is what was asked for" if outcomes else "no finished run"
        raise ConfigError(f"{', '.join(given.runs)}: {kept}.")
    return chosen.ordered(methods) if methods else chosen.ordered()


def only_grid(grids: dict[str, Grid]) -> Grid:
    """Return the only grid, and raise an error if there are several."""
    from ..errors import ConfigError

    if len(grids) > 1:
        raise ConfigError(f"There are results of several settings ({', '.join(grids)}): choose one with --settings.")
    return next(iter(grids.values()))


def fitted_paper(given: argparse.Namespace, grid: Grid) -> PublishedTable | None:
    """Return the chosen published table, fitted to these runs, and print in what it differs from them."""
    from ..papers.dct.reported import reported

    if given.paper is None:
        return None
    paper = reported(given.paper).fitted(grid, mix=given.mix)
    for mismatch in paper.mismatches(grid):
        print(f"mixed: the paper's table {paper.key} has another {mismatch}", file=sys.stderr)
    return paper


def _table(given: argparse.Namespace) -> None:
    from pathlib import Path

    from ..core.console import PlainConsole
    from ..core.files import write_whole
    from ..evaluation.formats import beside, write_table
    from ..papers.dct.protocols import source_remarks
    from ..report.page import page
    from ..report.terminal import show

    chosen = chosen_runs(given)
    grids = chosen.grids(mix=given.mix)
    console = PlainConsole()
    on_screen = given.format == "terminal" and not given.out
    grid = next(iter(grids.values())) if on_screen else only_grid(grids)
    papers = [fitted_paper(given, each) for each in grids.values()]
    for difference in (difference for each in grids.values() for difference in each.differences):
        print(f"mixed: {difference}", file=sys.stderr)
    if on_screen:
        show(chosen, console, mix=given.mix, remarks=source_remarks)
        for each, paper in zip(grids.values(), papers):
            if paper:
                console.print(beside(each, paper))
                for doubt in paper.doubts:
                    console.print(f"doubt: {doubt}", style="yellow")
        return
    title = given.title or f"Top-1 accuracy (%), {grid.scope}, {grid.model}"
    html = given.format == "html"
    text = page(grid, title=title, paper=papers[0]) if html else write_table(given.format, grid, title, papers[0])
    if given.out:
        write_whole(Path(given.out), text.encode())
        print(f"{given.out}: {len(text.encode())} bytes")
    else:
        print(text)
