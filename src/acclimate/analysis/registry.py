"""The figures that there are: every module of this folder that declares one.

A module declares its figure by a constant:

    FIGURE = FigureKind("rollout", "where the class token looks", 20, draw, draws=("rollout",), arguments=(METHOD, SEED))

`acclimate analyze` and the order of figures in `acclimate report` are made from these.
"""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from .figures import Figure, SavedFigure

FIVE = ("gaussian_noise", "frost", "defocus_blur", "contrast", "fog")  # the paper's choice for its t-SNE figures


@dataclass(frozen=True)
class Argument:
    """An argument of a figure: a keyword of its `draw`, and an option of its command.

    Args:
        name: The keyword; the option is `--name`.
        help: What it chooses.
        default: What it is if it is not given.
        type: Reads the option's text; list for words that are separated by commas.
        metavar: Stands for the value in the help.
        limits: The smallest and the largest value, if it is a whole number.
    """

    name: str
    help: str
    default: Any = None
    type: Callable[[str], Any] = str
    metavar: str = "NAME"
    limits: tuple[int, int] = (0, 2**31 - 1)


METHOD = Argument("method", "what adapts", "dct")
CORRUPTION = Argument("corruption", "the corruption of the images", "defocus_blur")
CORRUPTIONS = Argument("corruptions", "which, separated by commas", FIVE, list, "LIST")
SEVERITY = Argument("severity", "of the corruption; default: 5", None, int, "1..5", (1, 5))
SEED = Argument("seed", "of the order of the images and of the method", 0, int, "N", (0, 2**63 - 1))


@dataclass(frozen=True)
class FigureKind:
    """What `acclimate analyze` and `acclimate report` need to know of a figure.

    Args:
        name: Its command: `acclimate analyze NAME`.
        help: What it shows, in a few words.
        position: Its place among the figures.
        draw: Takes a `Subject` and the arguments as keywords, and returns what it has drawn.
        draws: The names of what it draws, in order.
        arguments: Those that it uses.
        clean: Whether it compares with clean images.
        labels: Whether it needs to know the classes of the images.
    """

    name: str
    help: str
    position: int
    draw: Callable[..., list[Figure]]
    draws: tuple[str, ...]
    arguments: tuple[Argument, ...]
    clean: bool = False
    labels: bool = False


def figure_titles() -> dict[str, str]:
    """Return the names of all figures with their help, in their order, without importing them, and torch with them."""
    lines = [line for path in Path(__file__).parent.glob("*.py") for line in ast.parse(path.read_text("utf-8")).body]
    found = []
    for line in lines:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "FIGURE" and isinstance(line.value, ast.Call):
            values: dict[str | None, ast.expr] = dict(zip(("name", "help", "position"), line.value.args))
            values |= {keyword.arg: keyword.value for keyword in line.value.keywords}
            found.append([ast.literal_eval(values[key]) for key in ("position", "name", "help")])
    return {name: about for _, name, about in sorted(found)}


@cache
def figure_kinds() -> list[FigureKind]:
    """Return all kinds of figures, in their order."""
    package = __name__.rpartition(".")[0]
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [import_module(f"{package}.{name}") for name in names]
    kinds = [module.FIGURE for module in modules if hasattr(module, "FIGURE")]
    return sorted(kinds, key=lambda kind: kind.position)


def figure_order() -> list[str]:
    """Return the names of all figures that are drawn, in the order in which a report shows them."""
    return [name for kind in figure_kinds() for name in kind.draws]


def saved_figures(folder: Path) -> list[SavedFigure]:
    """Return the figures in a folder, in the order of a report; those of unknown names come last."""
    order = figure_order()
    figures = [SavedFigure.read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(figures, key=lambda figure: order.index(figure.name) if figure.name in order else len(order))
