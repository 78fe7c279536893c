"""The command `acclimate check`."""

from __future__ import annotations

from ._arguments import Commands

POSITION = 120


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    check = commands.add_parser("check", help="run the conformance suite on a method")
    check.add_argument("method", metavar="METHOD", help="a method's name, or a Python file that registers some")
    check.set_defaults(run=lambda given: _check(given.method))


def _check(method: str) -> None:
    from ..core.registry import read_file
    from ..testing.check import check_method

    for name in read_file(method) if method.endswith(".py") else [method]:
        for where, outcome in check_method(name).items():
            print(f"{name}  {where}: {outcome}")
