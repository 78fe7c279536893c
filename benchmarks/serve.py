"""The load that `acclimate serve` bears: the plain model (method source) and methods that adapt, one after another.

    python benchmarks/serve.py [--methods source,tent,dct,keel] [--streams 1,16,200] [--seconds 10] [--soak 60]

For each method, a server of its own serves the bundled model. Clients send batches without a pause, each for one stream
after another, over connections that stay open, and count replies and refusals. Latencies are those of the clients. `learned`
is the share of the batches that were learned from: with a queue that is more than half full, batches are only predicted. Up
to 64 streams are in memory, and the others in files. MiB is the resident memory of the server. The soak repeats the last
setting for longer, and prints memory and open files at its quarters.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from acclimate.data import bundled


class Server:
    """A process of the server, and what the system tells about it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def memory(self) -> float:
        """Resident memory in MiB."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1024

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextlib.contextmanager
def running(method: str, folder: str, threads: int) -> Iterator[Server]:
    command = [sys.executable, "-m", "acclimate", "serve", "--model", "bundled", "--method", method, "--port", "0"]
    command += ["--states", folder, "--resident", "64", "--no-images"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        yield Server(process, int(re.search(r":(\d+)/", process.stdout.readline())[1]))
        process.kill()


def body(stream: int, size: int) -> tuple[bytes, dict[str, str]]:
    """Return a request in binary form, with pixels under fog."""
    pixels = bundled.PREPROCESS.normalised(bundled.images().pixels[stream * size : (stream + 1) * size]).numpy()
    content = (0.5 * pixels + 0.4).astype("<f4").tobytes()
    only = {
        "name": "images",
        "datatype": "FP32",
        "shape": list(pixels.shape),
        "parameters": {"binary_data_size": len(content)},
    }
    told = json.dumps({"inputs": [only], "outputs": [{"name": "class"}], "parameters": {"sequence_id": stream + 1}}).encode()
    return told + content, {"Inference-Header-Content-Length": str(len(told))}


def load(server: Server, streams: int, seconds: float, clients: int, size: int) -> tuple[list[float], int, int, float]:
    """Return the latencies of all replies, the numbers of batches learned from and of refusals, and the time it took."""
    requests = [body(stream, size) for stream in range(streams)]
    latencies: list[float] = []
    learned, refused = [], []
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        turn = number
        while time.perf_counter() < end:
            content, headers = requests[turn % streams]
            turn += clients
            start = time.perf_counter()
            connection.request("POST", "/v2/models/bundled/infer", content, headers)
            answer = connection.getresponse()
            told = answer.read()
            if answer.status == 200:
                latencies.append(time.perf_counter() - start)
                learned.append(json.loads(told)["parameters"]["learned"])
            else:
                refused.append(answer.status)
                time.sleep(0.05)

    start = time.perf_counter()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies, sum(learned), len(refused), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="source,tent,dct,keel")
    parser.add_argument("--streams", default="1,16,200")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--soak", type=float, default=0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    counts = [int(count) for count in given.streams.split(",")]
    titles = ("images/s", "p50 ms", "p95 ms", "p99 ms", "learned", "refused", "MiB")
    print(f"{'method':8} {'streams':>7}", *(f"{title:>8}" for title in titles))
    for method in given.methods.split(","):
        with tempfile.TemporaryDirectory() as folder, running(method, folder, given.threads) as server:
            load(server, 1, 2, 1, given.batch)  # warms up
            for streams in counts:
                latencies, learned, refused, took = load(server, streams, given.seconds, given.clients, given.batch)
                cuts = [1000 * cut for cut in statistics.quantiles(latencies, n=100)]
                rate = len(latencies) * given.batch / took
                share = learned / len(latencies)
                numbers = (rate, cuts[49], cuts[94], cuts[98])
                rest = (f"{share:8.0%}", f"{refused:8}", f"{server.memory():8.0f}")
                print(f"{method:8} {streams:7}", *(f"{value:8.0f}" for value in numbers), *rest, flush=True)
            if given.soak:
                for quarter in range(5):
                    print(f"  soak {quarter}/4: {server.memory():.0f} MiB, {server.files()} open files", flush=True)
                    if quarter < 4:
                        load(server, counts[-1], given.soak / 4, given.clients, given.batch)


if __name__ == "__main__":
    main()
