"""Accuracy under real time on a machine that others use: `acclimate bench --realtime`, by processor time.

    python benchmarks/realtime.py [--rate 100] [--methods tent,keel] [--corruptions fog,frost] [--images 512]

The durations of calls are the processor time of this process with one thread, and not the time on the wall. So another
process does not make a method late. The bundled model and images are used, at severity 5, in batches of 32. The output is a
table in Markdown.
"""

from __future__ import annotations

import argparse
import time

import torch

import acclimate
from acclimate.data.catalog import Selection
from acclimate.data.streams import Stream
from acclimate.evaluation.realtime import compare
from acclimate.evaluation.testbed import open_testbed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100, help="images a second; default: 100")
    parser.add_argument("--methods", help="default: all that the bundled model can run")
    parser.add_argument("--corruptions", default="fog,frost")
    parser.add_argument("--images", type=int, default=512)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = given.methods.split(",") if given.methods else acclimate.list_methods()
    testbed = open_testbed("bundled", "bundled", None, Selection(given.corruptions.split(","), [5], images=given.images))
    streams = [Stream([domain], "normal", batch_size=32, seed=0) for domain in testbed.data.domains]
    print("| method | offline | real time | learned from | lost |\n|---|---|---|---|---|")
    for method in chosen:
        try:
            (row,) = compare(testbed, [(method, {})], streams, given.rate, now=time.process_time)
        except acclimate.AcclimateError as error:
            print(f"| {method} | {error} |", flush=True)
            continue
        numbers = (f"{100 * share:.1f}" for share in (row.offline, row.accuracy, row.learned, row.lost))
        print(f"| {method} | {' | '.join(numbers)} |", flush=True)


if __name__ == "__main__":
    main()
