"""The command `acclimate analyze`."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from ._arguments import Commands, add_constants, add_data, add_device, add_model, new_command, open_given, selection
from ._parser import Parser, input_folder, output_folder, whole, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..analysis.registry import Argument, FigureKind
    from ..analysis.subject import Subject
    from ..evaluation.testbed import Testbed

POSITION = 40
EPILOG = """\
examples:
  acclimate analyze attention-distance                    how far each head of each block looks
  acclimate analyze rollout --corruption fog              where the class token looks, image by image
  acclimate analyze stream                                accuracy through one shift after another: the README's picture
  acclimate analyze all                                   every figure, for `acclimate report`
  acclimate analyze rollout --model vit_base_patch16_224.augreg_in21k_ft_in1k --data folder --root photos/
                                                          another model, and your own images, corrupted on the fly
  acclimate analyze rollout --model vit_base_patch16_224.augreg_in21k_ft_in1k \\
      --data imagenet-c --root /data/ImageNet-C --clean /data/imagenet/val

Each figure is written as PNG, as SVG, and as CSV with its numbers.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser. Its figures are added when it is used, and their arguments when one is chosen."""
    analyze = new_command(
        commands,
        "analyze",
        help="figures: attention, embeddings, sensitivity, ablation, cost, accuracy along a stream",
        description="Draw figures that show why a method does what it does.",
        epilog=EPILOG,
    )
    analyze.complete = partial(_add_figures, analyze)


def _add_figures(analyze: Parser) -> None:
    from ..analysis.registry import figure_titles

    commands = analyze.add_subparsers(title="figures", metavar="FIGURE", required=True)
    for name, about in {**figure_titles(), "all": "all of these"}.items():
        figure = commands.add_parser(name, help=about, description=f"Draw {about}.")
        figure.complete = partial(_add_arguments, figure, name)


def _add_arguments(figure: Parser, name: str) -> None:
    """Add the arguments of a figure. To find them imports torch."""
    from ..analysis.registry import figure_kinds

    chosen = [kind for kind in figure_kinds() if name in (kind.name, "all")]
    what = figure.add_argument_group("what")
    add_model(what)
    add_data(what)
    what.add_argument("--images", type=whole(1), metavar="N", help="images of each domain; default: at most 512")
    add_constants(what)
    if any(kind.clean for kind in chosen):
        what.add_argument(
            "--clean",
            type=input_folder,
            metavar="DIR",
            help="clean images for ImageNet-C, which has none: <wnid>/*.JPEG",
        )
    how = figure.add_argument_group("how")
    for argument in {argument.name: argument for kind in chosen for argument in kind.arguments}.values():
        told = argument.help + _default(argument.name, chosen)
        read = whole(*argument.limits) if argument.type is int else words if argument.type is list else argument.type
        how.add_argument(f"--{argument.name}", type=read, metavar=argument.metavar, help=told)
    add_device(how)
    how.add_argument("--out", type=output_folder, default="figures", metavar="DIR", help="default: %(default)s")
    figure.set_defaults(run=lambda given: _analyze(given, chosen))


def _default(name: str, kinds: Sequence[FigureKind]) -> str:
    """Return the default of an argument in words, for each figure if the defaults differ."""
    found: dict[str, list[str]] = {}
    for kind in kinds:
        for argument in kind.arguments:
            if argument.name == name and argument.default is not None:
                value = argument.default
                found.setdefault(",".join(value) if isinstance(value, tuple) else str(value), []).append(kind.name)
    if len(found) < 2:
        return "".join(f"; default: {value}" for value in found)
    return "; default: " + ", ".join(f"{value} ({', '.join(names)})" for value, names in found.items())


def _analyze(given: argparse.Namespace, kinds: Sequence[FigureKind]) -> None:
    from pathlib import Path

    out = Path(given.out)
    subject = _opened(given, kinds)
    for kind in kinds:
        for figure in kind.draw(subject, **{argument.name: _value(given, argument) for argument in kind.arguments}):
            print(f"{figure.title}: {', '.join(map(str, figure.save(out)))}")
            for finding in figure.findings:
                print(f"  {finding}")


def _value(given: argparse.Namespace, argument: Argument) -> Any:
    """Return the given value of an argument of a figure, or the figure's own default."""
    value = getattr(given, argument.name)
    return argument.default if value is None else value


def _opened(given: argparse.Namespace, kinds: Sequence[FigureKind]) -> Subject:
    """Open the model and one corruption of the data. Other corruptions are opened when a figure needs them."""
    from pathlib import Path

    from ..analysis.subject import IMAGES, Subject
    from ..core.console import PlainConsole
    from ..data.layouts import find_tree

    values = {argument.name: _value(given, argument) for kind in reversed(kinds) for argument in kind.arguments}
    corruption = values.get("corruption") or next(iter(values.get("corruptions", ())), None)
    severity = values.get("severity")
    chosen = {"corruptions": corruption and [corruption], "severities": severity and [severity]}
    wanted = argparse.Namespace(**{**vars(given), **chosen})
    labels = any(kind.labels for kind in kinds)
    shaped = given.data != "folder" or given.root is None or given.labels or find_tree(Path(given.root))
    testbed = open_given(wanted) if labels or shaped else _any_folder(wanted)
    clean = getattr(given, "clean", None)
    return Subject(
        testbed, given.images or IMAGES, clean and Path(clean), Path(given.out) / "runs", PlainConsole(stderr=True)
    )


def _any_folder(given: argparse.Namespace) -> Testbed:
    """Open a folder of images whose classes, if it has any, may differ from those of the model."""
    from pathlib import Path

    from ..analysis.subject import with_folder
    from ..data.catalog import Data

    nothing = {"data": Data("folder", [], ()), "root": None, "partial": False, "corruptions": None, "severities": None}
    testbed = open_given(argparse.Namespace(**{**vars(given), **nothing}))
    return with_folder(testbed, Path(given.root), selection(given), mean=given.mean, std=given.std)
