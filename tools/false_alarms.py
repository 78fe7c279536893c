"""Count the false alarms of the guard on streams on which nothing is wrong.

    python tools/false_alarms.py [--method keel] [--streams 200] [--images 2000] [--threads 1]

Streams of the bundled images in batches of 64: half of them are clean, and the others are under gaussian noise, pixelate or
jpeg compression of severity 3, which the model hardly notices. Every second stream is sorted by class, in another order of
the classes each time. Every stream shows other images, and the adapter begins with the source model. A stream counts if the
guard raised an alarm, or began a trial. 200 streams take half an hour. The counts so far are kept in runs/false-alarms.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from long_streams import EVERY
from rich.console import Console
from rich.progress import track

from acclimate.core.adapt import adapt
from acclimate.data.catalog import Selection
from acclimate.data.domains import Domain
from acclimate.evaluation.testbed import Testbed, open_testbed

SHOWN = ("clean", "gaussian_noise", "clean", "pixelate", "clean", "jpeg_compression")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="keel", help="default: %(default)s")
    parser.add_argument("--streams", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--images", type=int, default=2000, help="of each stream; default: %(default)s")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--runs", type=Path, default=Path("runs/false-alarms"))
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    testbed = open_testbed(selection=Selection(tuple(dict.fromkeys(SHOWN)), [3], images=EVERY, constants="cifar-10-c"))
    domains = {domain.key.name: domain for domain in testbed.data.domains}
    options.runs.mkdir(parents=True, exist_ok=True)
    found = []
    for number in track(range(options.streams), description=options.method, console=Console(stderr=True), transient=True):
        file = options.runs / f"{options.method}-{options.images}-{number}.json"
        if not file.exists():
            domain = domains[SHOWN[number // 2 % len(SHOWN)]]
            file.write_text(json.dumps(one_stream(testbed, options.method, domain, options.images, number)))
        found.append(json.loads(file.read_text()))
    alarms, trials = (sum(bool(each[kind]) for each in found) for kind in ("alarms", "trials"))
    worse = min(found, key=lambda each: each["points"])
    print(
        f"{options.method}, {len(found)} streams of {options.images} images: {alarms} with an alarm, {trials} with a trial. "
        f"Points above the unadapted model: mean {np.mean([each['points'] for each in found]):+.2f}, worst "
        f"{worse['points']:+.2f} ({worse['stream']})"
    )


def one_stream(testbed: Testbed, method: str, domain: Domain, count: int, number: int) -> dict[str, object]:
    """The events of the guard in one stream, and the difference from the unadapted model in points."""
    rng = np.random.RandomState(number)
    chosen, labels = rng.permutation(EVERY)[:count], np.asarray(domain.labels)
    is_sorted = number % 2 == 1
    if is_sorted:
        chosen = chosen[np.argsort(rng.permutation(labels.max() + 1)[labels[chosen]], kind="stable")]
    adapter, right = adapt(testbed.model, method), np.zeros(2)
    events: list[str] = []
    for indices in np.array_split(chosen, -(-count // 64)):
        images, truth = domain.load(indices), torch.from_numpy(labels[indices])
        right[0] += float((adapter.engine.unadapted(images).logits.argmax(1) == truth).sum())
        right[1] += float((adapter(images).argmax(1) == truth).sum())
        record = adapter.record
        assert record is not None
        events.append(record.event or "")
    adapter.unwrap()
    kinds = {"trials": ("on trial",), "alarms": ("slower", "resting")}
    return {
        "stream": f"{domain.key}{', sorted by class' if is_sorted else ''}, seed {number}",
        **{kind: [event for event in events if event.startswith(word)] for kind, word in kinds.items()},
        "points": 100 * (right[1] - right[0]) / count,
    }


if __name__ == "__main__":
    main()
