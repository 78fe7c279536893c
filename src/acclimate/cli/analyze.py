"""`acclimate analyze`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ._words import Commands, listed

if TYPE_CHECKING:
    from rich.console import Console

    from ..analysis.figures import Figure
    from ..analysis.scene import Scene

EPILOG = """\
examples:
  acclimate analyze attention-distance                    how far each head of each block looks
  acclimate analyze rollout --corruption fog              where the class token looks, picture by picture
  acclimate analyze all                                   every figure, for `acclimate report`
  acclimate analyze rollout --model vit_base_patch16_224.augreg_in21k_ft_in1k --pictures photos/
                                                          the same, of another model and other pictures

Each figure is written as PNG, as SVG, and as CSV with its numbers.
"""
FIGURES = {
    "attention-distance": "how far attention looks, block by block: clean, corrupted, adapted",
    "rollout": "where the class token looks: clean, corrupted, adapted",
    "tsne": "class tokens and conditioners by domain and by class, with the numbers that a map cannot give",
    "sensitivity": "accuracy against the learning rate of the generators",
    "ablation": "what each part of DCT is worth",
    "cost": "what a step of each method costs, side by side",
    "all": "all of these",
}
FAMILIES = "gaussian_noise,frost,defocus_blur,contrast,fog"  # the paper's choice for its t-SNE figures


def add(commands: Commands) -> None:
    analyze = commands.add_parser(
        "analyze",
        help="the paper's figures: attention, embeddings, sensitivity, ablation, cost",
        description="Draw figures that show why a method does what it does.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    figures = analyze.add_subparsers(title="figures", metavar="FIGURE", required=True)
    for name, what in FIGURES.items():
        figure = figures.add_parser(name, help=what, description=f"Draw {what}.")
        option = figure.add_argument
        option("--model", default="bundled", metavar="NAME", help="bundled, or a name of timm's (default: %(default)s)")
        option("--weights", metavar="FILE", help="a local file with the weights of such a model")
        option("--pictures", metavar="DIR", help="a folder of clean pictures (default: the bundled ones)")
        option("--count", type=int, default=512, metavar="N", help="of which so many (default: %(default)s)")
        option("--severity", type=int, metavar="1..5", help="default: 5; of the bundled pictures 2")
        option("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
        option("--device", metavar="NAME", help="default: a GPU if there is one")
        option("--out", default="figures", metavar="DIR", help="default: %(default)s")
        if name in ("attention-distance", "rollout", "tsne", "all"):
            option("--method", default="dct", metavar="NAME", help="what adapts (default: %(default)s)")
        if name in ("attention-distance", "rollout", "all"):
            option("--corruption", default="defocus_blur", metavar="NAME", help="default: %(default)s")
        if name in ("tsne", "sensitivity", "ablation", "all"):
            option("--corruptions", default=FAMILIES, metavar="LIST", help="default: %(default)s")
        if name in ("rollout", "all"):
            option("--rows", type=int, default=6, metavar="N", help="pictures shown (default: %(default)s)")
        figure.set_defaults(run=lambda given, name=name: _analyze(name, given))


def _analyze(name: str, given: argparse.Namespace) -> None:
    from pathlib import Path

    from rich.console import Console

    from ..analysis.scene import Scene

    console = Console(stderr=True)
    scene = Scene.open(
        given.model, given.pictures, weights=given.weights, count=given.count, device=given.device, console=console
    )
    for each in FIGURES if name == "all" else [name]:
        for figure in _draw(each, scene, given, console):
            print(f"{figure.title}: {', '.join(map(str, figure.save(Path(given.out))))}")
            for finding in figure.findings:
                print(f"  {finding}")


def _draw(name: str, scene: Scene, given: argparse.Namespace, console: Console) -> list[Figure]:
    from ..analysis import distance, rollout, studies, tsne

    how = {"severity": given.severity, "seed": given.seed, "console": console}
    if name == "attention-distance":
        return [distance.draw(scene, given.corruption, given.method, seed=given.seed, console=console)]
    if name == "rollout":
        return [rollout.draw(scene, given.corruption, given.method, rows=given.rows, **how)]
    if name == "tsne":
        return tsne.draw(scene, listed("corruptions", given.corruptions), given.method, **how)
    if name == "sensitivity":
        return [studies.sensitivity(scene, listed("corruptions", given.corruptions), store=f"{given.out}/runs", **how)]
    if name == "ablation":
        return [studies.ablation(scene, listed("corruptions", given.corruptions), store=f"{given.out}/runs", **how)]
    if name == "cost":
        return [studies.cost(scene, seed=given.seed, console=console)]
    return []
