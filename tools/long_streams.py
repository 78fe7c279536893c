"""Let methods adapt for long without a reset, on the bundled model, and print their accuracy in each part of the stream.

    python tools/long_streams.py [--methods source,keel] [--rounds 10 --images 128] [--long 50000] [--threads 1]

Two streams are shown, in batches of 64, at severity 5 with CIFAR-10-C's constants. The first one has several rounds over all
15 corruptions, of which each shows other images in each round. The second one has a single corruption and so many images
that all 10 000 are shown several times. Methods have their default options. Nothing is kept: start it again if it was
interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from acclimate.cli._arguments import methods
from acclimate.cli._parser import words
from acclimate.core.adapt import adapt
from acclimate.data.catalog import Selection
from acclimate.data.corruptions import CORRUPTIONS
from acclimate.data.domains import Domain
from acclimate.evaluation.testbed import open_testbed

EVERY = 8_000  # the bundled images; options were tuned on the other 2000
PARTS = 10  # of the second stream, for which accuracies are printed
Stream = list[tuple[int, Domain, np.ndarray]]  # the part of the table, and images of a domain, as indices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=words, default="source,source:recentre=True,keel", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="over the corruptions; default: %(default)s")
    parser.add_argument("--images", type=int, default=128, help="of a corruption in each round; default: %(default)s")
    parser.add_argument("--long", type=int, default=50_000, help="images of the second stream, or 0; default: %(default)s")
    parser.add_argument("--corruption", default="frost", help="of the second stream; default: %(default)s")
    parser.add_argument("--threads", type=int, help="default: torch's")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    testbed = open_testbed(selection=Selection(CORRUPTIONS, [5], images=EVERY, constants="cifar-10-c"))
    long = testbed.data.domain(options.corruption)
    for title, stream in (
        (f"{options.rounds} rounds of {options.images} images of each corruption", rounds(testbed.data.domains, options)),
        (f"{options.long} images under {options.corruption}", list(parts(long, options.long)) if options.long else []),
    ):
        if not stream:
            continue
        print(f"\n{title}: top-1 in % of each part\n\n| method |" + "".join(f" {i + 1} |" for i in range(stream[-1][0] + 1)))
        print("|---" * (stream[-1][0] + 2) + "|")
        for given in methods(options.methods):
            name, chosen = (given, {}) if isinstance(given, str) else given
            adapter = adapt(testbed.model, name, **chosen)
            cells = "".join(f" {accuracy:.1f} |" for accuracy in accuracies(adapter, stream, name))
            print(f"| {name} {chosen or ''} |{cells}", flush=True)
            adapter.unwrap()


def rounds(domains: list[Domain], options: argparse.Namespace) -> Stream:
    """The rounds, each with the same images of each corruption in another order."""
    rng = np.random.RandomState(0)
    shown = rng.permutation(EVERY)[: options.images]
    return [(i, domain, rng.permutation(shown)) for i in range(options.rounds) for domain in domains]


def parts(domain: Domain, count: int) -> Iterator[tuple[int, Domain, np.ndarray]]:
    """The images of one domain in random order, again and again."""
    rng = np.random.RandomState(0)
    order = np.concatenate([rng.permutation(len(domain.labels)) for _ in range(-(-count // len(domain.labels)))])[:count]
    for i, indices in enumerate(np.array_split(order, PARTS)):
        yield i, domain, indices


def accuracies(adapter: torch.nn.Module, stream: Stream, name: str) -> list[float]:
    """The accuracy in each part of the stream, in per cent."""
    right, met = np.zeros((2, stream[-1][0] + 1))
    for part, domain, indices in track(stream, description=name, console=Console(stderr=True), transient=True):
        for chosen in np.array_split(indices, -(-len(indices) // 64)):
            predicted = adapter(domain.load(chosen)).argmax(1).numpy()
            right[part] += (predicted == np.asarray(domain.labels)[chosen]).sum()
            met[part] += len(chosen)
    return list(100 * right / met)


if __name__ == "__main__":
    main()
