"""Runs that are interrupted, and grids that are spread over processes and machines."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from acclimate.data.domains import Domain, DomainKey
from acclimate.data.streams import Stream
from acclimate.errors import AcclimateError, ConfigError, StateError
from acclimate.evaluation import grid as grids
from acclimate.evaluation import jobs as work
from acclimate.evaluation import journal as journals
from acclimate.evaluation.grid import Execution, run_grid
from acclimate.evaluation.journal import latest_record
from acclimate.evaluation.run import run
from acclimate.evaluation.store import Store
from acclimate.evaluation.testbed import open_testbed
from acclimate.testing.check import tiny_batches, tiny_model


class Samples(Domain):
    """Random images; half of the labels are right at first."""

    def __init__(self, name: str = "fog", count: int = 60) -> None:
        self.key = DomainKey(name, 5)
        self._identity = f"{name}, {count} images"
        self._images = torch.cat(tiny_batches(count=-(-count // 8), size=8, seed=len(name)))[:count]
        with torch.no_grad():
            self.labels = tiny_model().eval()(self._images).argmax(1).numpy()
        self.labels[::2] = 0

    @property
    def identity(self):
        return self._identity

    def load(self, indices):
        return self._images[torch.from_numpy(indices)]


METHODS = {"source": {}, "tent": {"lr": 0.05}, "sar": {"margin": 2.2}, "dct": {"margin": 2.2}}


def grid(store=None, *, streams=None, methods=METHODS, **options):
    streams = streams or [Stream(Samples(), batch_size=8), Stream([Samples(), Samples("snow")], "mixed", batch_size=8)]
    testbed = open_testbed(tiny_model(), streams[0].domains, model_name="tiny", device="cpu")
    common = dict(store=store, console=options.pop("console", Console(quiet=True)), execution=Execution(**options))
    return run_grid(testbed, streams, methods, **common)


@pytest.fixture(scope="module")
def whole():
    return {outcome.spec.id: outcome.result.digest for outcome in grid()}


def digests(outcomes):
    return {outcome.spec.id: outcome.result.digest for outcome in outcomes}


def test_the_digest_is_of_the_predictions_not_of_the_clock(whole):
    assert digests(grid()) == whole
    assert len(set(whole.values())) == len(whole), "every run has its own"


@pytest.mark.parametrize("every", [0, 3600])
def test_a_run_that_is_interrupted_anywhere_ends_as_if_it_had_not_been(every, tmp_path, monkeypatch, whole):
    store, draw, interruptions = Store(tmp_path, every=every), random.Random(every), []

    def interrupted(adapter, stream, on_step, journal, **options):
        stop = draw.randint(1, 12)  # of up to 15 steps
        done = int(adapter.steps)

        def on_this_step(scores, record):
            if record.step >= stop and len(interruptions) < 12:
                interruptions.append((adapter.method.name, done, record.step))
                raise KeyboardInterrupt
            on_step(scores, record)

        return run(adapter, stream, on_this_step, journal, **options)

    monkeypatch.setattr(work, "run", interrupted)
    outcomes = None
    while outcomes is None:
        try:
            outcomes = grid(store, streams=[Stream([Samples(), Samples("snow")], "mixed", batch_size=8)])
        except KeyboardInterrupt:
            unfinished = list(tmp_path.glob("*/state.safetensors"))
            assert not any(state.with_name("result.json").exists() for state in unfinished)
            assert unfinished or every
    assert len(interruptions) >= 4
    assert len(outcomes) == 4 and digests(outcomes).items() <= whole.items()
    assert not list(tmp_path.glob("*/state.safetensors")), "a finished run keeps no state"
    for outcome in outcomes:
        lines = [json.loads(line) for line in (store.folder(outcome.spec) / "steps.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        assert lines[-1]["images"] == outcome.result.samples
        assert lines[-1]["right"] / lines[-1]["images"] == pytest.approx(outcome.result.top1)
        assert sum(line["used"] for line in lines) == outcome.result.used


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_grid import grid, METHODS
from acclimate.evaluation.store import Store
grid(Store({root!r}, every=0.01), methods={{"dct": METHODS["dct"]}})
"""


def test_a_run_that_is_killed_ends_as_if_it_had_not_been(tmp_path, whole):
    """kill -9, at random moments, in the middle of whatever it was writing."""
    program = SCRIPT.format(tests=str(Path(__file__).parent), root=str(tmp_path))
    draw, seen = random.Random(0), []
    for wanted in (2, 9):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        steps = 0
        while process.poll() is None and steps < wanted:
            lines = [latest_record(folder) for folder in tmp_path.glob("*-*")]
            steps = sum(line["step"] for line in lines if line)
            time.sleep(0.002)
        time.sleep(draw.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        seen.append(steps)
        assert process.wait() == -signal.SIGKILL, (process.stderr.read(), seen)
    outcomes = grid(Store(tmp_path), methods={"dct": METHODS["dct"]})
    assert digests(outcomes).items() <= whole.items()


def test_what_a_kill_leaves_half_written_is_cut_off(tmp_path, whole):
    store, methods = Store(tmp_path, every=0), {"tent": METHODS["tent"]}
    streams = [Stream(Samples(), batch_size=8)]
    (outcome,) = grid(store, streams=streams, methods=methods)
    folder = store.folder(outcome.spec)
    (folder / "result.json").unlink()
    with (folder / "steps.jsonl").open("ab") as file:
        file.write(b'{"step": 9, "ima')
    assert store.find(outcome.spec) is None, "a folder without a result is not done"
    assert digests(grid(store, streams=streams, methods=methods)).items() <= whole.items()


def test_a_state_without_its_steps_is_refused(tmp_path, monkeypatch):
    store, methods = Store(tmp_path, every=0), {"tent": METHODS["tent"]}
    monkeypatch.setattr(journals.Journal, "close", lambda self, finished: None)  # keeps the state
    (outcome,) = grid(store, streams=[Stream(Samples(), batch_size=8)], methods=methods)
    folder = store.folder(outcome.spec)
    (folder / "result.json").unlink()
    (folder / "steps.jsonl").write_bytes(b"")
    with pytest.raises(StateError, match=r"state\.safetensors does not follow from the lines of steps\.jsonl"):
        grid(store, streams=[Stream(Samples(), batch_size=8)], methods=methods)


def test_the_latest_step_is_read_while_it_is_written(tmp_path):
    assert latest_record(tmp_path) is None
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b'{"step": 1}')
    assert latest_record(tmp_path) is None, "not whole yet"
    file.write_bytes(b'{"step": 1}\n{"st')
    assert latest_record(tmp_path) == {"step": 1}
    file.write_bytes(b'{"step": 1}\n' + json.dumps({"step": 2, "nll": [0.1] * 5000}).encode() + b"\n")
    assert latest_record(tmp_path)["step"] == 2


def test_two_processes_do_not_do_the_same_run_twice(tmp_path, monkeypatch, whole):
    calls = []
    monkeypatch.setattr(work, "run", lambda *args, **options: (calls.append(1), time.sleep(0.2), run(*args, **options))[2])
    options = dict(streams=[Stream(Samples(), batch_size=8)], methods={"tent": METHODS["tent"]})
    results = []
    both = [threading.Thread(target=lambda: results.append(grid(Store(tmp_path), **options))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(calls) == 1
    assert digests(results[0]) == digests(results[1])
    assert digests(results[0]).items() <= whole.items()


def test_two_processes_give_what_one_gives(whole):
    assert digests(grid(jobs=2)) == whole


class Deadly(Samples):
    """Kills the process that loads it, as long as its file is not there."""

    def __init__(self, file: Path) -> None:
        super().__init__("fog")
        self.file = file

    def load(self, indices):
        if not self.file.exists() and 17 in indices:
            self.file.touch()
            os._exit(9)
        return super().load(indices)


def test_a_worker_that_dies_is_replaced_and_its_run_goes_on(tmp_path, whole):
    streams = [Stream(Deadly(tmp_path / "died"), batch_size=8)]
    outcomes = grid(Store(tmp_path / "runs", every=0), streams=streams, methods={"tent": METHODS["tent"]}, jobs=2)
    assert (tmp_path / "died").exists()
    assert digests(outcomes).items() <= whole.items()


def test_a_worker_that_always_dies_ends_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(grids, "MAX_CRASHES", 2)
    with pytest.raises(AcclimateError, match="2 worker processes in a row were killed"):
        grid(Store(tmp_path), streams=[Stream(Killer(), batch_size=8)], methods={"tent": {}}, jobs=2)


class Killer(Samples):
    def load(self, indices):
        os._exit(9)


class Local(Samples):
    def __init__(self) -> None:
        super().__init__()
        self.unpicklable = lambda: None


def test_what_cannot_be_sent_is_named():
    with pytest.raises(ConfigError, match="cannot be sent"):
        grid(streams=[Stream(Local(), batch_size=8)], jobs=2)


def test_shards_are_the_grid_in_parts(tmp_path, whole):
    parts = [digests(grid(Store(tmp_path), shard=(i, 3))) for i in (1, 2, 3)]
    assert sum(map(len, parts)) == len(whole)
    assert parts[0] | parts[1] | parts[2] == whole
    assert all(outcome.found for outcome in grid(Store(tmp_path)))
    for shard, message in (((4, 3), "at most the second"), ((0, 3), "shard=0"), ((9, 9), "empty")):
        with pytest.raises(ConfigError, match=message):
            grid(shard=shard)


def test_progress_is_a_line_for_each_run_where_there_is_no_terminal(tmp_path):
    console = Console(file=io.StringIO(), width=40)
    streams = [Stream(Samples(), batch_size=8)]
    outcomes = grid(streams=streams, console=console)
    lines = [line.split("\t") for line in console.file.getvalue().splitlines()]
    assert [line[:2] for line in lines] == [[f"{i}/4", name] for i, name in enumerate(METHODS, 1)]
    assert [line[-1] for line in lines] == [outcome.spec.id for outcome in outcomes]


class Slow(Samples):
    """A bar that is drawn ten times a second, and looks at other processes twice, gets to see it."""

    def load(self, indices):
        time.sleep(0.15)
        return super().load(indices)


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_on_a_terminal_tells_accuracy_and_health(jobs):
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    grid(streams=[Stream(Slow(), batch_size=8)], methods={"tent": {}}, console=console, jobs=jobs)
    text = console.file.getvalue()
    assert "all runs" in text and "tent on fog/5" in text and "entropy" in text and "drift" in text
