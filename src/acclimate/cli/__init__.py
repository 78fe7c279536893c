"""The command line. It imports torch only once a command needs it, so that help is immediate."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import AcclimateError
from . import analyze, bench, corrupt, data, dda, methods, paper, prompts, report, statistics, table, train

EPILOG = """\
examples:
  acclimate bench                       how much does adaptation help? four methods, four corruptions, two minutes
  acclimate corrupt photos/ out/ --name fog --severity 5
                                        fog over a folder of pictures, as in ImageNet-C
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
    for command in (bench, table, report, analyze, paper, data, train, prompts, statistics, corrupt, dda, methods):
        command.add(commands)

    given = parser.parse_args(arguments)
    # threads of OpenMP that spin while they wait are no faster alone, and many times slower beside other work
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        given.run(given)
    except AcclimateError as error:
        print(f"acclimate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nacclimate: interrupted. What was finished is whole; the same command goes on from there.", file=sys.stderr)
        return 130
    return 0
