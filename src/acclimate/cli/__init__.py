"""The command line.

torch is imported only when a command needs it, so that help is printed without delay. Every file of this folder whose name
does not begin with an underscore is a command. It has a function `add`, which adds the parser of the command, and a number
`POSITION`, its position in the list of commands.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import warnings
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from .. import __version__
from ._parser import Parser
from ._reported import reported

EPILOG = """\
examples:
  acclimate bench                       how much does adaptation help? five methods, eight corruptions, three minutes
  acclimate corrupt photos/ out/ --corruptions fog --severities 5
                                        fog over a folder of images, as in ImageNet-C
  acclimate run --model NAME --root photos/ --predictions out.csv
                                        adapt to images without labels, and predict them
  acclimate methods                     all methods: what each adapts, and its paper
  acclimate methods dct                 one method with its options and their defaults
  acclimate inspect tuesday.safetensors what a state file holds
  acclimate check mine.py               run the conformance suite on the methods that a file registers

in Python:
  model = acclimate.adapt(model, "dct")   wraps any model that returns logits
  logits = model(images)                  predicts, and adapts
"""


def command_modules() -> list[ModuleType]:
    """Return the modules of all commands, in the order of the list of commands."""
    found = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    return sorted((import_module(f"{__name__}.{name}") for name in found), key=lambda module: module.POSITION)


def build_parser() -> Parser:
    """Return the parser with all commands."""
    parser = Parser(
        prog="acclimate",
        description="Image classifiers that adapt to a new domain while they predict.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"acclimate {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in command_modules():
        module.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    # Threads of OpenMP that wait actively are no faster, and much slower if other processes need the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")  # of Pillow; acclimate refuses such images
    with reported() as outcome:
        given = build_parser().parse_args(arguments)
        outcome.code = given.run(given) or 0
    return outcome.code
