"""How a command ends when the world does not cooperate: closed pipes, full disks, Ctrl-C, odd names and foreign locks."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

import acclimate
from acclimate.cli import main
from acclimate.core.console import PlainConsole
from acclimate.data import bundled
from acclimate.data.domains import CLEAN, Corrupted, DomainKey, Subset
from acclimate.evaluation.progress import ProgressView
from acclimate.evaluation.results import Results
from acclimate.evaluation.store import Store
from acclimate.report.terminal import show
from support import child_environment

FULL = os.path.exists("/dev/full")


def acclimate_process(*arguments, **options):
    command = [sys.executable, "-m", "acclimate", *arguments]
    return subprocess.run(command, env=child_environment(), stderr=subprocess.PIPE, **options)


@pytest.fixture
def closed():
    """The end of a pipe that nobody reads."""
    theirs, ours = os.pipe()
    os.close(theirs)
    yield ours
    os.close(ours)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    acclimate.bench(methods=["source", "tent"], corruptions=["fog"], images=8, out=root)
    return root


# ---- the output -------------------------------------------------------------------------------------------------


def test_a_reader_that_has_gone_ends_the_command_without_a_word(closed):
    done = acclimate_process("--help", stdout=closed)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not FULL, reason="there is no /dev/full")
def test_a_full_disk_under_the_output_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = acclimate_process("--help", stdout=full)
    assert (done.returncode, done.stderr) == (1, b"acclimate: No space left on device.\n")


@pytest.mark.parametrize("command", [["data", "list"], ["methods"], ["methods", "dct"], ["table", "RUNS"], ["paper"]])
def test_every_way_to_print_knows_a_closed_pipe_and_a_full_disk(command, runs, closed, monkeypatch, capsys):
    command = [word.replace("RUNS", str(runs)) for word in command]
    outputs = [(141, os.fdopen(os.dup(closed), "w"))] + ([(1, open("/dev/full", "w"))] if FULL else [])  # noqa: SIM115
    for code, output in outputs:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(command) == code
        assert ("No space left" in capsys.readouterr().err) == (code == 1)
        output.close()  # what is left in its buffer goes nowhere


def test_arguments_that_are_not_utf_8_are_shown_escaped():
    done = acclimate_process("table", b"nowhere\xff")
    assert done.returncode == 2 and rb"nowhere\udcff" in done.stderr


def test_a_title_that_is_not_utf_8_makes_a_page_that_is(runs, tmp_path):
    page = tmp_path / "page.html"
    assert main(["table", str(runs), "--format", "html", "--title", "\udcff", "--out", str(page)]) == 0
    assert "<title>" in page.read_text("utf-8")


# ---- the machine ------------------------------------------------------------------------------------------------


def full(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_loses_nothing(runs, tmp_path, monkeypatch, capsys):
    file = tmp_path / "table.csv"
    file.write_text("before")
    bench = ["bench", "--methods", "source", "--corruptions", "snow", "--images", "8", "--out", str(tmp_path / "runs")]
    monkeypatch.setattr(os, "replace", full)
    for command, named in (
        (["table", str(runs), "--format", "csv", "--out", str(file)], str(file)),
        (["report", str(runs), "-o", str(file)], str(file)),
        (["source-statistics", "--images", "8", "--kinds", "features", "--out", str(file)], str(file)),
        (bench, "spec.json"),
    ):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert error.splitlines()[-1].startswith("acclimate: Cannot write") and "No space left on device" in error
        assert named in error and file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["table.csv"], "no temporary file is left"
    monkeypatch.undo()
    assert main(bench) == 0


def test_a_disk_that_is_full_in_the_middle_of_a_run_is_one_sentence(tmp_path, monkeypatch, capsys):
    command = ["bench", "--methods", "tent", "--corruptions", "fog", "--images", "32", "--batch-size", "8"]
    command += ["--out", str(tmp_path)]
    written = []

    def record(line, adapter, **options):
        written.append(line)
        if len(written) == 3:
            full()

    with monkeypatch.context() as patch:
        patch.setattr("acclimate.evaluation.journal.Journal.record", lambda self, *args, **options: record(*args))
        assert main(command) == 1
    assert "tent-fog-5" in (error := capsys.readouterr().err) and "No space left on device" in error
    assert main(command) == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines"),
        RuntimeError("can't start new thread"),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "file"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_what_the_machine_lacks_is_said_in_one_sentence(error, monkeypatch, capsys):
    def lacking(*args, **options):
        raise error

    monkeypatch.setattr("acclimate.core.statefile.read", lacking)
    assert main(["inspect", "file"]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("an assumption does not hold")

    monkeypatch.setattr("acclimate.core.statefile.read", broken)
    with pytest.raises(RuntimeError, match="assumption"):
        main(["inspect", "file"])


def test_ctrl_c_is_one_line_and_code_130(monkeypatch, capsys):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("acclimate.core.statefile.read", interrupted)
    assert main(["inspect", "file"]) == 130
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


# ---- names ------------------------------------------------------------------------------------------------------

ODD = [
    DomainKey("mean"),
    DomainKey("second half"),
    DomainKey("a/b"),
    DomainKey("a/5"),
    DomainKey("a", 5),
    DomainKey("a", 4),
    DomainKey("[/b]"),
    DomainKey(":smile:"),
    DomainKey("../up"),
]


class Odd(Subset):
    """Eight of the bundled images under another name."""

    def __init__(self, key):
        super().__init__(Corrupted(bundled.images(), CLEAN, mean=bundled.MEAN, std=bundled.STD), np.arange(8))
        self.key = key


@pytest.fixture(scope="module")
def odd_runs(tmp_path_factory):
    """Runs of domains whose names are those of something else, by a method whose name is markup."""
    root = tmp_path_factory.mktemp("odd") / "runs"
    acclimate.bench(data=[Odd(key) for key in ODD], methods=["source", "tent"], model_name="[/b]", out=root)
    assert {path.parent.parent for path in root.parent.rglob("result.json")} == {root}, "no name leads out of the folder"
    return root


def test_columns_with_the_names_of_others_can_be_told_apart(odd_runs, tmp_path, capsys):
    for form in ("json", "csv", "markdown", "latex", "html", "terminal"):
        assert main(["table", str(odd_runs), "--format", form]) == 0
        out = capsys.readouterr().out
        assert "[/b]" in out or form == "html"
        if form == "json":
            table = json.loads(out)
            assert len(set(table["columns"])) == len(table["columns"]) == len(ODD) + 2
            assert len(table["rows"]["tent"]["cells"]) == len(ODD) + 2
            assert {"mean", "'mean'", "second half", "'second half'", "a/b", "'a/5'", "'a'/5", "a/4"} < {*table["columns"]}
    assert main(["report", str(odd_runs), "-o", str(tmp_path / "page.html")]) == 0


def test_names_are_no_markup_on_any_console(odd_runs):
    results = Results(Store(odd_runs).outcomes())
    for console in (Console(file=io.StringIO(), width=200), PlainConsole(file=io.StringIO(), width=200)):
        show(results, console, remarks=lambda grid: ["a remark on [/b]"])
        assert "model [/b]" in console.file.getvalue() and "remark on [/b]" in console.file.getvalue()
    assert "model [/b]" in results.table() and "[/b]" in results._repr_html_()


def test_progress_shows_names_as_they_are(odd_runs):
    class FakeJob:
        spec, stream = Store(odd_runs).outcomes()[0].spec, type("FakeStream", (), {"samples": 8})

    FakeJob.spec.domains[:] = [DomainKey("[/b]")]
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    with ProgressView([FakeJob()], {}, Store(odd_runs), console) as view:
        view._show(0, 8, 4, 0.1, 0.2, "[/b] happened")
    assert "on [/b]" in console.file.getvalue() and "[/b] happened" in console.file.getvalue()


# ---- locks ------------------------------------------------------------------------------------------------------


def test_a_lock_that_a_dead_process_left_is_taken_over(tmp_path):
    command = ["bench", "--methods", "source", "--corruptions", "fog", "--images", "8", "--out", str(tmp_path)]
    assert main(command) == 0
    (result,) = tmp_path.glob("*/result.json")
    before = json.loads(result.read_text())["digest"]
    result.unlink()
    (result.parent / ".lock").write_bytes(b"\xff\x00 pid 1234567 on another machine")
    assert main(command) == 0
    assert json.loads(result.read_text())["digest"] == before
