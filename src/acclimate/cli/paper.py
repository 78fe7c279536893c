"""The command `acclimate paper`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ._arguments import Commands, add_device, new_command
from ._parser import MOST_PROCESSES, input_files, input_folder, output_folder, whole

if TYPE_CHECKING:
    from rich.console import Console

    from ..papers.dct.experiments import Experiment

POSITION = 60
EPILOG = """\
examples:
  acclimate paper                                          every table and figure: its data, model, cost and command
  acclimate paper table-normal --root /data/ImageNet-C     run one; after an interruption, the same command continues
  acclimate paper table-normal --dry-run                   what would be run
  acclimate paper table-normal --scale small               try it on the bundled model and images
  acclimate paper --scale small                            try them all

EATA, CFA and DePT-G are left out without --source-statistics, DDA without --denoiser. Drawings: `acclimate analyze`.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    paper = new_command(
        commands,
        "paper",
        help="the DCT paper's tables: what each needs, and how to run it",
        description="List and run the tables and figures of the DCT paper (Tang et al., ACM MM 2024) as experiments.",
        epilog=EPILOG,
    )
    paper.add_argument("name", nargs="?", metavar="NAME", help="run this one; without, list them")
    paper.add_argument("--root", metavar="DIR", help="the folder of the data set of the experiment")
    paper.add_argument("--scale", default="full", choices=["full", "small"], help="small: the bundled model and images")
    paper.add_argument("--dry-run", action="store_true", help="print the grid of runs, and run nothing")
    paper.add_argument(
        "--source-models",
        type=input_folder,
        metavar="DIR",
        help="for Office-Home: what train-source wrote, one file a domain",
    )
    paper.add_argument(
        "--source-statistics",
        type=input_files,
        metavar="LIST",
        help="files of the experiment's model, for methods that need them",
    )
    paper.add_argument(
        "--denoiser", metavar="FILE", help="of DDA: 256x256_diffusion_uncond.pt, or a folder that `acclimate dda` wrote"
    )
    paper.add_argument(
        "--jobs", type=whole(1, MOST_PROCESSES), default=1, metavar="N", help="runs at a time; default: %(default)s"
    )
    paper.add_argument("--on", choices=["ray"], help="run on a Ray cluster")
    add_device(paper)
    paper.add_argument("--reference", action="store_true", help="every method as its authors' code; no guard")
    paper.add_argument(
        "--out", type=output_folder, default="runs", metavar="DIR", help="where runs are kept; default: %(default)s"
    )
    paper.add_argument("--fresh", action="store_true", help="run again what was run before")
    paper.set_defaults(run=_paper)


def _paper(given: argparse.Namespace) -> None:
    from ..core.console import PlainConsole
    from ..evaluation.formats import beside
    from ..evaluation.grid import Execution
    from ..papers.dct import experiments as paper
    from ..papers.dct.protocols import source_remarks
    from ..report.terminal import show

    console = PlainConsole()
    if given.name is None and given.scale == "full":
        _list(console)
        return
    statistics = given.source_statistics
    for experiment in [paper.find(given.name)] if given.name else paper.experiments().values():
        if given.dry_run:
            _plan(console, experiment, given.scale)
            continue
        for title, results, published in paper.run(
            experiment,
            given.root,
            scale=given.scale,
            source_models=given.source_models,
            denoiser=given.denoiser,
            source_statistics=statistics,
            reference=given.reference,
            execution=Execution(jobs=given.jobs, on=given.on, device=given.device),
            out=given.out,
            fresh=given.fresh,
            console=console if console.is_terminal else PlainConsole(stderr=True),
        ):
            console.rule(f"{experiment.name}: {title}")
            show(results, console, remarks=source_remarks)
            if published is not None:
                for grid in results.grids().values():
                    console.print(beside(grid, published.fitted(grid, mix=True)))
                for doubt in published.doubts:
                    console.print(f"doubt: {doubt}", style="yellow")
        left_out = experiment.lacking(statistics, given.denoiser) if given.scale == "full" else []
        if left_out:
            console.print(f"Left out without --source-statistics or --denoiser: {', '.join(left_out)}.", style="dim")


def _list(console: Console) -> None:
    from rich.table import Table

    from ..papers.dct.experiments import ANALYSES, experiments

    table = Table(title="The DCT paper's experiments", header_style="bold", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("shows")
    table.add_column("data", no_wrap=True)
    table.add_column("GPU hours", justify="right")
    for experiment in experiments().values():
        table.add_row(experiment.name, experiment.shows, experiment.data, f"{experiment.hours:.1f}")
    console.print(table)
    console.print(
        "ViT-B/16 unless another model is named. GPU hours are rough: the paper's running times on an RTX 3090, for three "
        "seeds and the methods that are here. One image at a time takes longer.",
        style="dim",
    )
    drawn = ", ".join(f"{name} (`acclimate analyze {command}`)" for name, command in ANALYSES.items())
    console.print(f"Its drawings: {drawn}.", style="dim", highlight=False)


def _plan(console: Console, experiment: Experiment, scale: str) -> None:
    """Print the runs of an experiment at a scale."""
    from rich.text import Text

    from ..papers.dct.experiments import SEEDS, small_grid, small_images

    small = scale == "small"
    grid = small_grid(experiment) if small else {"seeds": SEEDS, **experiment.grid, "methods": experiment.methods}
    methods = [
        m if isinstance(m, str) else ":".join([m[0], *(f"{k}={v}" for k, v in m[1].items())]) for m in grid["methods"]
    ]
    cost = f"{experiment.images:,} images for each method and seed, about {experiment.hours:,.0f} GPU hours"
    shown = {name: value for name, value in grid.items() if name not in ("methods", "data")}
    lines = {
        "data": f"{'bundled images in place of ' if small else ''}{experiment.data}",
        "model": "bundled" if small else experiment.model,
        "methods": ", ".join(methods),
        "grid": ", ".join(f"{name} {value}" for name, value in shown.items()),
        "cost": f"{small_images(experiment):,} images for each method, without a GPU" if small else cost,
        "command": experiment.command(scale),
    }
    console.print(Text.assemble((experiment.name, "bold"), f": {experiment.shows}"))
    for name, text in lines.items():
        console.print(f"  {name:<10}{text}", highlight=False)
    if experiment.needing and not small:
        console.print(f"  only with --source-statistics or --denoiser: {', '.join(experiment.needing)}")
