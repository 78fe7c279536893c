"""The command line. It imports torch only once a command needs it, so that help is immediate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .errors import AcclimateError

EPILOG = """\
examples:
  acclimate methods                     all methods: what each adapts, and its paper
  acclimate methods dct                 one method with its options and their defaults
  acclimate inspect tuesday.safetensors what a state file holds
  acclimate check mine.py               run the conformance suite on the methods that a file registers

in Python:
  model = acclimate.adapt(model, "dct")   wraps a timm, transformers or torchvision ViT
  logits = model(images)                  predicts, and adapts
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="acclimate",
        description="Vision transformers that adapt to a new domain while they predict.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"acclimate {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    methods = commands.add_parser("methods", help="list the methods, or explain one")
    methods.add_argument("name", nargs="?", metavar="NAME", help="explain this method and its options")
    methods.set_defaults(run=lambda given: _explain(given.name) if given.name else _list())

    inspect = commands.add_parser("inspect", help="show what a state file holds")
    inspect.add_argument("file", metavar="FILE", help="a file written by Adapter.save()")
    inspect.set_defaults(run=lambda given: _inspect(given.file))

    check = commands.add_parser("check", help="run the conformance suite on a method")
    check.add_argument("method", metavar="METHOD", help="a method's name, or a Python file that registers some")
    check.set_defaults(run=lambda given: _check(given.method))

    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except AcclimateError as error:
        print(f"acclimate: {error}", file=sys.stderr)
        return 2
    return 0


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from .method import find, list_methods

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("method", "adapts", "paper"):
        table.add_column(column)
    for name in list_methods():
        cls = find(name)
        table.add_row(name, cls.adapts, cls.paper)
    Console().print(table)


def _explain(name: str) -> None:
    import inspect

    from .method import find

    cls = find(name)
    print(f"{name} ({cls.paper}); adapts {cls.adapts}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n")
    defaults = ", ".join(f"{option}={p.default!r}" for option, p in cls.options().items())
    print(f"acclimate.adapt(model, {name!r}, {defaults})")


def _inspect(path: str) -> None:
    import json

    from .state import read

    tensors, header = read(path)
    print(json.dumps(header, indent=2))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    print(f"{len(tensors)} tensors, {size / 2**20:.1f} MiB")


def _check(method: str) -> None:
    from .check import check_method
    from .errors import ConfigError
    from .method import list_methods

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


if __name__ == "__main__":
    sys.exit(main())
