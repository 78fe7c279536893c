"""Processes of a grid: they end with their parent, save what they have when they are told to, and say what went wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_grid import METHODS, Samples, digests, grid

from acclimate.cli import main
from acclimate.core import processes, registry
from acclimate.core.processes import finishing_steps
from acclimate.data.streams import Stream
from acclimate.errors import ConfigError
from acclimate.evaluation.grid import Execution
from acclimate.evaluation.journal import latest_record
from acclimate.evaluation.store import Store
from support import child_environment

LINUX = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists processes as Linux does")
DEADLINE = 600  # seconds; generous, because the machine may be busy
METHOD = """
import os, time
import acclimate
from acclimate.methods.tent import Tent


@acclimate.register("slow-tent")
class SlowTent(Tent):
    def step(self, images, engine):
        if "ACCLIMATE_TEST_RUNS" in os.environ:
            runs, folder = os.environ["ACCLIMATE_TEST_RUNS"].split(":", 1)
            open(os.path.join(folder, str(os.getpid())), "w").close()
            while len(os.listdir(folder)) < int(runs):  # a process that started late is waited for
                time.sleep(0.05)
            time.sleep(0.3)
        return super().step(images, engine)
"""


@pytest.fixture(scope="module")
def method(tmp_path_factory):
    file = tmp_path_factory.mktemp("method") / "slow.py"
    file.write_text(METHOD)
    yield str(file)
    registry._REGISTRY.pop("slow-tent", None)
    registry._FILES.pop(file.resolve(), None)


def bench(method, root, jobs, workers=0):
    """Return the arguments of two runs of 25 steps."""
    what = ["--methods", method, "--corruptions", "fog,snow", "--images", "200", "--batch-size", "8", "--threads", "1"]
    return ["bench", *what, "--out", str(root), "--jobs", str(jobs), "--workers", str(workers)]


@pytest.fixture
def start(method, tmp_path):
    """Start a slow grid in another process, as the leader of a group, and wait until `jobs` of its runs are in progress."""
    root, begun, started = tmp_path / "runs", tmp_path / "begun", []
    begun.mkdir()

    def begin(jobs, workers=0):
        command = [sys.executable, "-m", "acclimate", *bench(method, root, jobs, workers)]
        environment = {**child_environment(), "ACCLIMATE_TEST_RUNS": f"{jobs}:{begun}"}
        with (tmp_path / "stderr").open("w") as errors:
            process = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True)
        started.append(process)
        wait_until(lambda: len(running(root)) == jobs or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        return process, root

    yield begin
    for process in started:
        process.kill()
        process.wait()


def running(root):
    """Return the last record of every run in progress."""
    return [line for folder in root.glob("*-*") if (line := latest_record(folder)) is not None]


def wait_until(reached):
    end = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < end, "too late"
        time.sleep(0.05)


def descendants(pid):
    """Return the processes that a process started, and those that these started. Zombies are not counted."""
    found, tasks = [], Path(f"/proc/{pid}/task")
    for file in tasks.glob("*/children") if tasks.exists() else ():
        for child in map(int, file.read_text().split()):
            found += [child, *descendants(child)]
    return [pid for pid in found if alive(pid)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@LINUX
@pytest.mark.parametrize(("jobs", "workers"), [(1, 1), (2, 0)])
def test_no_process_survives_a_parent_that_is_killed(jobs, workers, start):
    process, _ = start(jobs, workers)
    children = descendants(process.pid)
    assert len(children) >= (jobs if jobs > 1 else workers)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, children)))


def heeds_ctrl_c(pid):
    """Return whether any thread of a process neither blocks SIGINT nor ignores it."""
    for file in Path(f"/proc/{pid}/task").glob("*/status"):
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
        if not (int(fields["SigBlk"], 16) | int(fields["SigIgn"], 16)) >> (signal.SIGINT - 1) & 1:
            return True
    return False


@LINUX
def test_an_interrupted_grid_saves_its_states_and_goes_on_exactly(start, method, whole):
    """In a terminal, all processes of the group get Ctrl-C. Only the parent heeds it, and tells the others."""
    process, root = start(2)
    children = descendants(process.pid)
    assert heeds_ctrl_c(process.pid) and not any(map(heeds_ctrl_c, children))
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(DEADLINE) == 130
    wait_until(lambda: not any(map(alive, children)))
    error = (root.parent / "stderr").read_text().strip()
    assert error.startswith("acclimate: interrupted") and len(error.splitlines()) == 1, error
    states = list(root.glob("*/state.safetensors"))
    assert len(states) == 2, "saved at the interruption, because 30 seconds have not passed"
    assert all(0 < latest_record(state.parent)["step"] < 25 for state in states)
    assert main(bench(method, root, 1)) == 0
    assert digests(Store(root).outcomes()) == whole


@pytest.fixture(scope="module")
def whole(method, tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    assert main(bench(method, root, 1)) == 0
    return digests(Store(root).outcomes())


class Interrupting(Samples):
    """Images at which Ctrl-C comes, unless its file is there."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def load(self, indices):
        if not self.file.exists() and 17 in indices:
            self.file.touch()
            signal.raise_signal(signal.SIGINT)
        return super().load(indices)


def test_ctrl_c_in_a_single_process_saves_the_state_after_the_step(tmp_path):
    def run(store, domain):
        return grid(store, streams=[Stream(domain, batch_size=8)], methods={"tent": METHODS["tent"]})

    with pytest.raises(KeyboardInterrupt):
        run(Store(tmp_path / "runs"), Interrupting(tmp_path / "interrupted"))
    (state,) = (tmp_path / "runs").glob("*/state.safetensors")
    assert 0 < latest_record(state.parent)["step"] < 8
    outcomes = run(Store(tmp_path / "runs"), Interrupting(tmp_path / "interrupted"))
    assert digests(outcomes) == digests(run(None, Samples()))


class Explosive(Samples):
    """Images that cannot be read by another process."""

    def __setstate__(self, state):
        raise ConfigError("the images are not there")


def test_an_error_at_the_start_of_a_process_is_that_error(tmp_path):
    before = threading.enumerate()
    with pytest.raises(ConfigError, match="the images are not there"):
        grid(Store(tmp_path), streams=[Stream(Explosive(), batch_size=8)], methods={"tent": {}}, jobs=2)
    assert threading.enumerate() == before, "a thread that still ends its processes disturbs the end of Python"
    assert not multiprocessing.active_children()


def test_ctrl_c_waits_for_the_end_of_a_step():
    finished = []
    with pytest.raises(KeyboardInterrupt), finishing_steps() as ending:
        for step in range(3):
            if step == 1:
                signal.raise_signal(signal.SIGINT)
            finished.append(step)
            if ending():
                raise KeyboardInterrupt
    assert finished == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_does_not_get_lost_after_the_last_step():
    with pytest.raises(KeyboardInterrupt), finishing_steps():
        signal.raise_signal(signal.SIGINT)
    with finishing_steps() as ending:
        assert not ending()


def test_a_second_ctrl_c_interrupts_at_once_and_a_long_step_is_interrupted_too(monkeypatch):
    with pytest.raises(KeyboardInterrupt), finishing_steps():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("not reached")
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.05)
    with pytest.raises(KeyboardInterrupt), finishing_steps():
        signal.raise_signal(signal.SIGINT)
        time.sleep(DEADLINE)
        pytest.fail("not reached")


@pytest.mark.parametrize("wrong", [{"threads": 100_000}, {"jobs": 100_000}, {"workers": 100_000}, {"workers": -1}])
def test_more_processes_than_any_machine_has_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Execution(**wrong)
