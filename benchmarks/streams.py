"""What a stream costs beside the model: memory, the size of its file, and the time to switch to it.

    python benchmarks/streams.py [--model vit_base_patch16_224] [--methods tent,dct,keel] [--streams 16]

The weights are random: sizes do not depend on them. After one step, which makes the state of the optimizer, so many streams
are opened. `MB in memory` counts the tensors of one of them. The times are medians: to switch between streams in memory, and
between streams of which one alone is in memory and the others are in files.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from step import source

import acclimate
from acclimate.serve.streams import Streams


def milliseconds(call: Callable[[str], object], names: list[str]) -> float:
    """Return the median time of a call for each name."""
    times = []
    for name in names:
        start = time.perf_counter()
        call(name)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def measured(name: str, method: str, count: int, folder: str) -> list[float]:
    """Return the MB of a stream in memory and in its file, and the milliseconds to switch in memory and through files."""
    adapter = acclimate.adapt(source(name), method, reply="first")
    size = adapter.engine.view.image_size or (224, 224)
    streams = Streams(adapter, folder, resident=count + 2, interval=1e9)
    names = [f"stream-{i}" for i in range(count)]
    stream = streams.get("first")
    adapter(torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)))
    adapter.wait()
    stream.changed = time.time()
    state = streams.content("first")
    for other in names:
        streams.replace(other, state)
    within = milliseconds(streams.get, names)
    memory = sum(tensor.nbytes for tensor in streams.known["first"].tensors.values())
    streams.close()
    streams = Streams(adapter, folder, resident=1)
    through = milliseconds(streams.get, names)
    streams.close()
    return [memory / 1e6, len(state) / 1e6, within, through]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--methods", default="source,tent,sar,eta,dct,keel")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{'method':8} {'MB in memory':>13} {'MB in file':>11} {'ms in memory':>13} {'ms through files':>17}")
    for method in given.methods.split(","):
        with tempfile.TemporaryDirectory() as folder:
            memory, file, within, through = measured(given.model, method, given.streams, folder)
        print(f"{method:8} {memory:13.2f} {file:11.2f} {within:13.1f} {through:17.1f}", flush=True)


if __name__ == "__main__":
    main()
