"""The command `acclimate inspect`."""

from __future__ import annotations

from ._arguments import Commands

POSITION = 110


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    inspect = commands.add_parser("inspect", help="show what a state file holds")
    inspect.add_argument("file", metavar="FILE", help="a file written by Adapter.save()")
    inspect.set_defaults(run=lambda given: _inspect(given.file))


def _inspect(path: str) -> None:
    import json

    from ..core.statefile import read

    tensors, header = read(path)
    print(json.dumps(header, indent=2))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    print(f"{len(tensors)} tensors, {size / 2**20:.1f} MiB")
