"""The command `acclimate report`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ._arguments import Commands, new_command
from ._parser import output_file
from .table import add_runs, chosen_runs, fitted_paper, only_grid

if TYPE_CHECKING:
    from ..analysis.figures import SavedFigure
    from ..evaluation.tables import Grid

POSITION = 30
EPILOG = """\
examples:
  acclimate bench && acclimate report runs/               the results of a bench as a page: report.html
  acclimate bench && acclimate analyze all && acclimate report runs/
                                                          the same with the figures that explain them

The page is one file that needs no network: table, accuracy and health along the stream, costs, events, figures, and the
protocol. Figures are those that `acclimate analyze` wrote; those of another model are left out, and the command says so.
Runs and figures that were edited are refused.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    report = new_command(
        commands,
        "report",
        help="one page with results, health, figures and protocol, to send to a colleague",
        description="Write finished runs and figures as one page.",
        epilog=EPILOG,
    )
    add_runs(report)
    report.add_argument("-o", "--out", type=output_file, default="report.html", metavar="FILE", help="default: %(default)s")
    report.add_argument("--figures", metavar="DIR", help="of `acclimate analyze` (default: figures, if there is one)")
    report.set_defaults(run=_report)


def _report(given: argparse.Namespace) -> None:
    from pathlib import Path

    from ..analysis.registry import saved_figures
    from ..core.files import write_whole
    from ..errors import ConfigError
    from ..report.page import page

    folder = Path(given.figures or "figures")
    saved = saved_figures(folder)
    if given.figures and not saved:
        raise ConfigError(f"--figures {folder}: there is none; `acclimate analyze all --out {folder}` draws them.")
    grid = only_grid(chosen_runs(given).grids(mix=given.mix))
    paper = fitted_paper(given, grid)
    figures = _of_model(saved, grid)
    title = given.title or f"Adaptation at test time: {grid.scope}, {grid.model}"
    text = page(grid, title=title, paper=paper, figures=figures)
    write_whole(Path(given.out), text.encode())
    drawn = f"{len(figures)} figures" if figures else "no figures, which `acclimate analyze all` would draw"
    print(f"{given.out}: {len(grid.outcomes)} runs, {drawn}; {len(text.encode()) / 2**20:.1f} MiB")


def _of_model(saved: list[SavedFigure], grid: Grid) -> list[SavedFigure]:
    """Return the figures of the model of the runs, and print which ones belong to another model."""
    models = [outcome.spec.model for outcome in grid.outcomes]
    kept = []
    for figure in saved:
        if any(figure.shows(model) for model in models):
            kept.append(figure)
            continue
        whose = f"{figure.origin.get('model')}, weights {figure.origin.get('weights')}"
        print(
            f"{figure.name}: left out, because it is of another model ({whose}) than the runs ({grid.model}, weights "
            f"{models[0]['weights']})."
        )
    return kept
