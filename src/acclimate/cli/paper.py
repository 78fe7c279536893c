"""`acclimate paper`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ._words import Commands, words

if TYPE_CHECKING:
    from rich.console import Console

    from ..papers.dct.experiments import Experiment

EPILOG = """\
examples:
  acclimate paper                                          every table and figure: its data, model, cost and command
  acclimate paper table-normal --root /data/ImageNet-C     run one; interrupted, the same command goes on
  acclimate paper table-normal --dry-run                   what would be run
  acclimate paper table-normal --scale small               try it on the bundled model and images
  acclimate paper --scale small                            try them all

EATA, CFA and DePT-G are left out without --source-statistics, DDA without --denoiser. Pictures: `acclimate analyze`.
"""


def add(commands: Commands) -> None:
    paper = commands.add_parser(
        "paper",
        help="the DCT paper's tables: what each needs, and how to run it",
        description="The tables and figures of the DCT paper (Tang et al., ACM MM 2024) as experiments.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    paper.add_argument("name", nargs="?", metavar="NAME", help="run this one; without, list them")
    paper.add_argument("--root", metavar="DIR", help="where the experiment's data set is")
    paper.add_argument("--scale", default="full", choices=["full", "small"], help="small: the bundled model and images")
    paper.add_argument("--dry-run", action="store_true", help="print the grid of runs, and run nothing")
    paper.add_argument("--source-models", metavar="DIR", help="for Office-Home: what train-source wrote, one file a domain")
    paper.add_argument("--source-statistics", metavar="FILES", help="of the experiment's model, for methods that need them")
    paper.add_argument(
        "--denoiser", metavar="FILE", help="of DDA: 256x256_diffusion_uncond.pt, or a folder that `acclimate dda` wrote"
    )
    paper.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time; default: %(default)s")
    paper.add_argument("--on", choices=["ray"], help="run on a Ray cluster")
    paper.add_argument("--device", metavar="NAME", help="default: a GPU if there is one")
    paper.add_argument("--reference", action="store_true", help="every method as its authors' code; no guard")
    paper.add_argument("--out", default="runs", metavar="DIR", help="where runs are kept; default: %(default)s")
    paper.set_defaults(run=_paper)


def _paper(given: argparse.Namespace) -> None:
    from rich.console import Console

    from ..evaluation.tables import beside
    from ..papers.dct import experiments as paper
    from .bench import show

    console = Console()
    if given.name is None and given.scale == "full":
        _list(console)
        return
    chosen = [paper.find(given.name)] if given.name else list(paper.experiments().values())
    for experiment in chosen:
        if given.dry_run:
            _plan(console, experiment, given.scale)
            continue
        options = dict(jobs=given.jobs, on=given.on, device=given.device, reference=given.reference, store=given.out)
        options |= dict(source_statistics=words(given.source_statistics) or None)
        for title, results, reported in paper.run(
            experiment, given.root, scale=given.scale, source_models=given.source_models, denoiser=given.denoiser,
            console=console if console.is_terminal else Console(stderr=True), **options,
        ):  # fmt: skip
            console.rule(f"{experiment.name}: {title}")
            show(results, console)
            if reported is not None:
                for setting, grid in results.grids().items():
                    by_setting = reported.setting is None and setting in reported.columns
                    console.print(beside(grid, reported.only(setting) if by_setting else reported))
                for doubt in reported.doubts:
                    console.print(f"doubt: {doubt}", style="yellow")
        left_out = experiment.lacking(options["source_statistics"], given.denoiser) if given.scale == "full" else []
        if left_out:
            console.print(f"Left out without --source-statistics or --denoiser: {', '.join(left_out)}.", style="dim")


def _list(console: Console) -> None:
    from rich.table import Table

    from ..papers.dct.experiments import PICTURES, experiments

    table = Table(title="The DCT paper's experiments", header_style="bold", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("shows")
    table.add_column("data", no_wrap=True)
    table.add_column("GPU hours", justify="right")
    for experiment in experiments().values():
        table.add_row(experiment.name, experiment.shows, experiment.data, f"{experiment.hours:.1f}")
    console.print(table)
    console.print(
        "ViT-B/16 where nothing else is said. GPU hours are rough: the paper's running times on an RTX 3090, three seeds, "
        "the methods that are here; one image at a time takes longer.",
        style="dim",
    )
    drawn = ", ".join(f"{picture} (`acclimate analyze {command}`)" for picture, command in PICTURES.items())
    console.print(f"Its pictures: {drawn}.", style="dim", highlight=False)


def _plan(console: Console, experiment: Experiment, scale: str) -> None:
    grid, chosen = experiment.grid, experiment.methods
    methods = [m if isinstance(m, str) else ":".join([m[0], *(f"{k}={v}" for k, v in m[1].items())]) for m in chosen]
    console.print(f"[bold]{experiment.name}[/]: {experiment.shows}")
    console.print(f"  data      {experiment.data if scale == 'full' else 'bundled images'}")
    console.print(f"  model     {experiment.model if scale == 'full' else 'bundled'}")
    console.print(f"  methods   {', '.join(methods)}")
    if experiment.needing:
        console.print(f"  only with --source-statistics or --denoiser  {', '.join(experiment.needing)}")
    console.print(f"  grid      { {k: v for k, v in grid.items() if k != 'methods'} or 'one stream for each target' }")
    console.print(
        f"  cost      {experiment.images:,} images for each method and seed, about {experiment.hours:.0f} GPU hours"
    )
    console.print(f"  command   {experiment.command}")
