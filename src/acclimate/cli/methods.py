"""The command `acclimate methods`."""

from __future__ import annotations

import argparse

from ..errors import ConfigError
from ._arguments import Commands

POSITION = 100


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    methods = commands.add_parser("methods", help="list the methods, or explain one")
    methods.add_argument("name", nargs="?", metavar="NAME", help="a method, or a Python file that registers one")
    methods.add_argument("--model", metavar="MODEL", help="list the methods that suit this model, and what others miss")
    methods.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """List the methods, list those that suit a model, or explain one."""
    if given.name and given.model:
        raise ConfigError("Give the name of a method, or a model, and not both.")
    if given.name:
        _explain(given.name)
    elif given.model:
        _fitting(given.model)
    else:
        _list()


def _fitting(name: str) -> None:
    from ..core.registry import find_method, fitting_methods, list_methods
    from ..models.families import view_of
    from ..models.loading import architecture
    from ..models.view import PARTS

    seen = view_of(architecture(name))
    fitting = fitting_methods(seen)
    print(f"{name} has:")
    for part in seen.parts:
        print(f"  {PARTS[part]}")
    print(f"\n{len(fitting)} methods suit it: {', '.join(fitting)}.")
    for method in (each for each in list_methods() if each not in fitting):
        missing = [PARTS[part] for part in find_method(method).info.requires if part not in seen.parts]
        print(f"{method} needs {' and '.join(missing)}.")


def describe(name: str) -> dict[str, str]:
    """Return what a method with its default options adapts, needs, costs and remembers, and its paper, by heading."""
    from ..core.registry import create_method, find_method
    from ..core.statistics import KINDS

    cls = find_method(name)
    needs = [f"{KINDS[kind].what} ({kind})" for kind in cls.info.needs]
    needs += ["augmentation"] if cls.info.augments else []
    needs += ["a diffusion model"] if "denoiser" in cls.options() else []
    windowed = "with window=" if "window" in cls.options() else "no"
    forward, backward = create_method(name, {}).info.passes
    return {
        "adapts": cls.info.adapts,
        "beyond the batch": ", ".join(needs) or "nothing",
        "one image": windowed if "batch_of_one" in cls.info.exceptions else "yes",
        "passes": f"{forward} + {backward}" if backward else f"{forward}",
        "remembers": cls.info.remembers,
        "paper": cls.info.paper,
    }


def _list() -> None:
    from rich.table import Table
    from rich.text import Text

    from ..core.console import PlainConsole
    from ..core.registry import list_methods

    rows = {name: describe(name) for name in list_methods()}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    for heading in rows["source"]:
        table.add_column(heading)
    for name, row in rows.items():
        table.add_row(*map(Text, (name, *row.values())))
    console = PlainConsole()
    console.print(table)
    console.print(
        "\nBeyond the batch: what needs source statistics or trained prompts is not source-free. One image: whether a "
        "stream of single images can be adapted to. Passes: forward + backward, of each image, at most. "
        "`acclimate methods NAME` explains one.",
        highlight=False,
    )


def _explain(name: str) -> None:
    import inspect

    from ..core.registry import find_method

    cls = find_method(name)
    print(f"{name} ({cls.info.paper}); adapts {cls.info.adapts}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n")
    defaults = ", ".join(f"{option}={p.default!r}" for option, p in cls.options().items())
    print(f"acclimate.adapt(model, {name!r}, {defaults})")
