"""`acclimate methods`, `inspect` and `check`."""

from __future__ import annotations

from ._words import Commands


def add(commands: Commands) -> None:
    methods = commands.add_parser("methods", help="list the methods, or explain one")
    methods.add_argument("name", nargs="?", metavar="NAME", help="explain this method and its options")
    methods.set_defaults(run=lambda given: _explain(given.name) if given.name else _list())

    inspect = commands.add_parser("inspect", help="show what a state file holds")
    inspect.add_argument("file", metavar="FILE", help="a file written by Adapter.save()")
    inspect.set_defaults(run=lambda given: _inspect(given.file))

    check = commands.add_parser("check", help="run the conformance suite on a method")
    check.add_argument("method", metavar="METHOD", help="a method's name, or a Python file that registers some")
    check.set_defaults(run=lambda given: _check(given.method))


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from ..core.registry import create, find, list_methods
    from ..core.statistics import KINDS

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    for column in ("adapts", "beyond the batch", "one image", "passes", "remembers", "paper"):
        table.add_column(column)
    for name in list_methods():
        cls = find(name)
        needs = [f"{KINDS[kind].what} ({kind})" for kind in cls.info.needs]
        needs += ["augmentation"] if cls.info.augments else []
        needs += ["a diffusion model"] if "denoiser" in cls.options() else []
        windowed = "with window=" if "window" in cls.options() else "no"
        alone = windowed if "batch_of_one" in cls.info.exceptions else "yes"
        forward, backward = create(name, {}).info.passes
        passes = f"{forward} + {backward}" if backward else f"{forward}"
        table.add_row(
            name, cls.info.adapts, ", ".join(needs) or "nothing", alone, passes, cls.info.remembers, cls.info.paper
        )
    console = Console()
    console.print(table)
    console.print(
        "\nBeyond the batch: what needs source statistics or trained prompts is not source-free. One image: whether a "
        "stream of single images can be adapted to. Passes: forward + backward, of each image, at most. "
        "`acclimate methods NAME` explains one.",
        highlight=False,
    )


def _explain(name: str) -> None:
    import inspect

    from ..core.registry import find

    cls = find(name)
    print(f"{name} ({cls.info.paper}); adapts {cls.info.adapts}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n")
    defaults = ", ".join(f"{option}={p.default!r}" for option, p in cls.options().items())
    print(f"acclimate.adapt(model, {name!r}, {defaults})")


def _inspect(path: str) -> None:
    import json

    from ..core.statefile import read

    tensors, header = read(path)
    print(json.dumps(header, indent=2))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    print(f"{len(tensors)} tensors, {size / 2**20:.1f} MiB")


def _check(method: str) -> None:
    from ..core.registry import list_methods
    from ..errors import ConfigError
    from ..testing.check import check_method

    names = [method]
    if method.endswith(".py"):
        import runpy

        known = set(list_methods())
        runpy.run_path(method)
        names = [name for name in list_methods() if name not in known]
        if not names:
            raise ConfigError(f"{method} registers no method: decorate a class with acclimate.register(...).")
    for name in names:
        for where, outcome in check_method(name).items():
            print(f"{name}  {where}: {outcome}")
