"""`acclimate report`."""

from __future__ import annotations

import argparse

from ._words import Commands

EPILOG = """\
examples:
  acclimate bench && acclimate report runs/               the results of a bench as a page: report.html
  acclimate bench && acclimate analyze all && acclimate report runs/
                                                          the same with the figures that explain them

The page is one file that needs no network: table, accuracy and health along the stream, costs, events, figures, and the
protocol. Figures are those that `acclimate analyze` wrote; it says where it found none.
"""
ORDER = ["attention-distance", "rollout", "class-tokens", "separability", "conditioners", "sensitivity", "ablation", "cost"]


def add(commands: Commands) -> None:
    report = commands.add_parser(
        "report",
        help="one page with results, health, figures and protocol, to send to a colleague",
        description="Write finished runs and figures as one page.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("runs", nargs="+", metavar="DIR", help="folders of `acclimate bench --out`, or of single runs")
    report.add_argument("-o", "--out", default="report.html", metavar="FILE", help="default: %(default)s")
    report.add_argument("--figures", metavar="DIR", help="of `acclimate analyze` (default: figures, if there is one)")
    report.add_argument("--setting", metavar="NAME", help="only this one; needed where there are several")
    report.add_argument(
        "--paper", metavar="TABLE", help="the paper's numbers beside ours; `acclimate paper` lists its tables"
    )
    report.add_argument("--mix", action="store_true", help="put results of different protocols into one table")
    report.add_argument("--title", metavar="TEXT", help="of the page")
    report.set_defaults(run=_report)


def _report(given: argparse.Namespace) -> None:
    from pathlib import Path

    from ..analysis.figures import Kept
    from ..core.files import write_whole
    from ..errors import ConfigError
    from ..evaluation.results import Results
    from ..evaluation.store import Store
    from ..papers.dct.reported import reported
    from ..report.page import page
    from .table import ordered

    figures = Path(given.figures or "figures")
    words = sorted(
        figures.glob("*.json"), key=lambda file: (ORDER.index(file.stem) if file.stem in ORDER else len(ORDER), file)
    )
    if given.figures and not words:
        raise ConfigError(f"--figures {figures}: there is none; `acclimate analyze all --out {figures}` draws them.")
    outcomes = [
        outcome
        for folder in given.runs
        for outcome in Store(folder).outcomes()
        if given.setting in (None, outcome.spec.setting)
    ]
    if not outcomes:
        raise ConfigError(f"{', '.join(given.runs)}: no finished run{' of that setting' if given.setting else ''}.")
    grids = Results(ordered(outcomes)).grids(mix=given.mix)
    if len(grids) > 1:
        raise ConfigError(f"There are results of several settings ({', '.join(grids)}): choose one with --setting.")
    ((setting, grid),) = grids.items()
    title = given.title or f"Adaptation at test time: {grid.model}, {setting}"
    paper = given.paper and reported(given.paper)
    kept = [Kept.read(file) for file in words]
    text = page(grid.outcomes, title=title, paper=paper, notes=grid.differences, figures=kept)
    write_whole(Path(given.out), text.encode())
    drawn = f"{len(kept)} figures" if kept else "no figures, which `acclimate analyze all` would draw"
    print(f"{given.out}: {len(grid.outcomes)} runs, {drawn}; {len(text.encode()) / 2**20:.1f} MiB")
