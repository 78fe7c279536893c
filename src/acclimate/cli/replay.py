"""The command `acclimate replay`."""

from __future__ import annotations

import argparse

from ._arguments import Commands, new_command
from ._parser import input_file

POSITION = 130
EPILOG = """\
examples:
  acclimate replay recordings/*.safetensors    repeat recorded runs of the authors' code, and compare

A recording holds weights, batches, the logits of every step and the adapted tensors at the end. The exit code is 1 if a
recording deviates beyond its own tolerance, or is of a method that is not known.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    replay = new_command(
        commands,
        "replay",
        help="repeat recorded runs of reference implementations, and compare",
        description="Repeat recorded runs of reference implementations with reference=True, and compare.",
        epilog=EPILOG,
    )
    replay.add_argument("files", nargs="+", type=input_file, metavar="FILE", help="recordings (.safetensors)")
    replay.set_defaults(run=_replay)


def _replay(given: argparse.Namespace) -> int:
    from ..testing.replay import replay

    results = [replay(file) for file in given.files]
    for result in results:
        print(result)
    return int(any(result.problems for result in results))
