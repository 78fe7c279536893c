"""The server on a local Ray cluster with two replicas, of which one is killed under load."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from test_server import TOKEN, WHERE, Server, images, running  # noqa: F401

from acclimate.core import statefile

pytest.importorskip(
    "ray.serve.experimental.consistent_hash_router", reason="Ray Serve is not installed: pip install 'acclimate[ray]'"
)

WINDOW = 1.0  # seconds until a change is written
SLACK = 2.0  # seconds that a busy machine may need beyond that


class Cameras:
    """Streams of a server: requests to them, when these were answered, and which process has each stream."""

    def __init__(self, server: Server, states: Path, pixels: np.ndarray) -> None:
        self.server, self.states, self.answered = server, states, defaultdict(list)
        self.only = {"name": "images", "datatype": "FP32", "shape": list(pixels.shape), "data": pixels.ravel().tolist()}

    def send(self, name: str) -> None:
        until = time.monotonic() + 30
        while True:
            asked = {"inputs": [self.only], "parameters": {"sequence_id": name}}
            code, told, headers = self.server.ask("POST", WHERE, asked)
            if code == 200:
                assert told["parameters"] == {"learned": True, "stream": name}
                self.answered[name].append(time.monotonic())
                return
            assert code == 503 and headers["Retry-After"] and time.monotonic() < until, told
            time.sleep(0.1)

    def process(self, name: str) -> int:
        return int((self.states / f"{name}.safetensors.owner").read_text().split()[1])

    def steps(self, name: str) -> int:
        code, content, _ = self.server.ask("GET", f"/streams/{name}/state", Authorization=f"Bearer {TOKEN}")
        assert code == 200
        return statefile.parse(name, content)[1]["steps"]


def test_another_replica_takes_over_when_one_is_killed(tmp_path, images):  # noqa: F811
    with running(tmp_path, "--on", "ray", "--replicas", "2", "--write-after", str(WINDOW)) as server:
        cameras = Cameras(server, tmp_path / "states", images[:1])
        while len(cameras.answered) < 8 or len({*map(cameras.process, cameras.answered)}) < 2:
            assert len(cameras.answered) < 50, "all streams are at one replica"
            cameras.send(f"camera-{len(cameras.answered)}")
        before = {name: cameras.process(name) for name in cameras.answered}
        victim = before["camera-0"]
        ended = threading.Event()

        def load(names: list[str]) -> None:
            while not ended.is_set():
                for name in names:
                    cameras.send(name)

        with ThreadPoolExecutor(2) as threads:
            loads = [threads.submit(load, list(before)[half::2]) for half in range(2)]
            try:
                time.sleep(WINDOW + SLACK)
                os.kill(victim, signal.SIGKILL)
                killed, until = time.monotonic(), time.monotonic() + 60
                while {*map(cameras.process, before)} <= {*before.values()}:
                    assert time.monotonic() < until, "no other replica came"
                    time.sleep(0.1)
                time.sleep(0.5)
            finally:
                ended.set()
            for each in loads:
                each.result()
        after = {name: cameras.process(name) for name in before}
        assert victim not in after.values() and len({*after.values()}) == 2
        for name, process in before.items():
            lost = len(cameras.answered[name]) - cameras.steps(name)
            if process == victim:  # a request that was not answered may have been learned from
                window = [answered for answered in cameras.answered[name] if killed - WINDOW - SLACK < answered <= killed]
                assert -1 <= lost <= len(window) < len(cameras.answered[name]), name
            else:
                assert lost == 0, f"{name} was {'moved' if after[name] != process else 'kept'}"
        shown = [each["name"] for each in server.ask("GET", "/streams")[1]["streams"]]
        assert sorted(shown) == sorted(before), "each stream is at one replica"
        steps = {name: cameras.steps(name) for name in before}
        for name in before:
            cameras.send(name)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        written = {name: statefile.read(tmp_path / "states" / f"{name}.safetensors")[1]["steps"] for name in before}
        assert written == {name: count + 1 for name, count in steps.items()}, "all states are written at the end"
