"""Files that are written whole, while other processes read and write them, and are killed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import acclimate
from acclimate.core import files, statefile
from acclimate.core.files import TEMPORARY, read_whole, replacing, write_whole
from acclimate.errors import StateError
from acclimate.methods.dda import unet
from acclimate.testing.check import tiny_model
from support import child_environment

SAVE_IN_A_LOOP = """
import sys
from pathlib import Path
from acclimate.core.files import write_whole
contents = [Path(name).read_bytes() for name in sys.argv[2:]]
print("ready", flush=True)
while True:
    for content in contents:
        write_whole(Path(sys.argv[1]), content)
"""
STOP_HALFWAY = """
import sys
from pathlib import Path
from acclimate.core.files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half of")
    file.flush()
    print("ready", flush=True)
    sys.stdin.readline()
    file.write(b" a file")
print("done", flush=True)
"""


@contextlib.contextmanager
def process(script: str, *arguments: Path):
    """Run a script until it has said that it is ready, and kill it at the end."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=child_environment(), **pipes) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(TEMPORARY)]


def states(folder: Path) -> list[Path]:
    """Return two state files of different sizes."""
    paths = [folder / "one", folder / "two"]
    for size, path in enumerate(paths, start=1):
        statefile.write(path, {"x": torch.full((size * 50_000,), float(size))}, {"size": size})
    return paths


# ---- processes --------------------------------------------------------------------------------------------------------


def test_a_reader_never_sees_damage_while_another_process_saves(tmp_path):
    one, two = states(tmp_path)
    path = tmp_path / "state"
    path.write_bytes(one.read_bytes())
    seen = []
    with process(SAVE_IN_A_LOOP, path, one, two):
        end = time.monotonic() + 2
        while time.monotonic() < end or len(set(seen)) < 2:
            tensors, header = statefile.read(path)
            assert len(tensors["x"]) == header["size"] * 50_000
            seen.append(header["size"])
    assert len(seen) > 10


def test_a_file_that_is_overwritten_in_place_is_read_when_it_is_whole(tmp_path):
    """Other tools copy without care: the reader waits as long as the file changes."""
    path, content = tmp_path / "state", states(tmp_path)[1].read_bytes()
    path.write_bytes(content[:1000])

    def copy_slowly():
        with path.open("r+b") as file:
            for start in range(0, len(content), len(content) // 8):
                file.seek(start)
                file.write(content[start : start + len(content) // 8])
                file.flush()
                time.sleep(0.02)

    writer = threading.Thread(target=copy_slowly)
    writer.start()
    assert statefile.read(path)[1]["size"] == 2
    writer.join()


def test_a_damaged_file_that_nobody_writes_is_refused_soon(tmp_path, monkeypatch):
    path = states(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(StateError, match="truncated"):
        statefile.read(path)
    assert len(pauses) == 1


def test_a_file_that_another_machine_replaced_is_opened_again(tmp_path, monkeypatch):
    path, stale = states(tmp_path)[0], [OSError(errno.ESTALE, "Stale file handle")] * 3
    fstat = os.fstat

    def failing(descriptor):
        if stale:
            raise stale.pop()
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", failing)
    assert statefile.read(path)[1]["size"] == 1 and not stale


def test_a_killed_writer_leaves_the_old_file_and_the_next_save_cleans_up(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"before")
    with process(STOP_HALFWAY, path) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert path.read_bytes() == b"before" and len(temporaries(tmp_path)) == 1
    write_whole(tmp_path / "another file", b"x")
    assert temporaries(tmp_path) == []


def test_the_file_of_a_writer_that_lives_stays(tmp_path):
    path = tmp_path / "state"
    with process(STOP_HALFWAY, path) as child:
        for _ in range(3):
            write_whole(path, b"mine")
        assert len(temporaries(tmp_path)) == 1 and path.read_bytes() == b"mine"
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
    assert path.read_bytes() == b"half of a file" and temporaries(tmp_path) == []


def test_a_writer_may_be_killed_at_any_moment(tmp_path):
    one, two = states(tmp_path)
    path, draw = tmp_path / "state", random.Random(0)
    path.write_bytes(one.read_bytes())
    for _ in range(20):
        with process(SAVE_IN_A_LOOP, path, one, two) as child:
            time.sleep(draw.random() * 0.02)
            child.send_signal(signal.SIGKILL)
            child.wait()
        assert statefile.read(path)[1]["size"] in (1, 2)
        assert len(temporaries(tmp_path)) <= 1  # each writer removes what its predecessor has left
    write_whole(path, one.read_bytes())
    assert temporaries(tmp_path) == []


def test_many_threads_may_write_one_file(tmp_path):
    path, contents = tmp_path / "state", [bytes([i]) * 100_000 for i in range(8)]
    threads = [threading.Thread(target=lambda c=c: [write_whole(path, c) for _ in range(5)]) for c in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert path.read_bytes() in contents
    assert path.read_bytes() in contents and temporaries(tmp_path) == []


def test_only_abandoned_files_of_ours_are_removed(tmp_path):
    other = tmp_path / "elsewhere"
    other.write_bytes(b"keep")
    (tmp_path / f"link{TEMPORARY}").symlink_to(other)
    (tmp_path / f"folder{TEMPORARY}").mkdir()
    os.mkfifo(tmp_path / f"pipe{TEMPORARY}")
    (tmp_path / f".old{TEMPORARY}").write_bytes(b"abandoned")
    write_whole(tmp_path / "state", b"x")
    assert sorted(temporaries(tmp_path)) == [f"folder{TEMPORARY}", f"link{TEMPORARY}", f"pipe{TEMPORARY}"]
    assert other.read_bytes() == b"keep"


# ---- what is replaced -------------------------------------------------------------------------------------------------


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link, second = tmp_path / "folder" / "target", tmp_path / "link", tmp_path / "second"
    target.write_bytes(b"before")
    link.symlink_to("folder/target")
    second.symlink_to(link)
    write_whole(second, b"after")
    assert second.is_symlink() and link.is_symlink() and not target.is_symlink() and target.read_bytes() == b"after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "second"]
    target.unlink()
    write_whole(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StateError, match="loop"):
        write_whole(tmp_path / "loop", b"x")
    with pytest.raises(StateError, match="loop"):
        read_whole(tmp_path / "loop")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o666])
def test_a_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "state"
    path.write_bytes(b"before")
    path.chmod(mode)
    with replacing(path) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~mode == 0  # nobody else can read it meanwhile
        file.write(b"after")
    assert stat.S_IMODE(path.stat().st_mode) == mode and path.read_bytes() == b"after"


def test_a_new_file_gets_the_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "state", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o640


@pytest.mark.skipif(os.getuid() != 0, reason="only an administrator may give a file away")
def test_a_file_keeps_its_owner(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"before")
    os.chown(path, 12345, 54321)
    write_whole(path, b"after")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)


def identity(path: Path) -> tuple[int, ...]:
    about = path.stat()
    return about.st_mode, about.st_ino, about.st_rdev, about.st_uid


def test_what_is_not_a_file_is_refused_and_not_touched(tmp_path):
    folder, pipe, path = tmp_path / "folder", tmp_path / "pipe", tmp_path / "socket"
    folder.mkdir()
    (folder / "inside").touch()
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as server:
        address = Path(short) / "s"  # the address of a socket has a limited length
        server.bind(str(address))
        path.symlink_to(address)
        cases = {folder: "folder", pipe: "pipe", path: "socket", link: "device", Path("/dev/null"): "device"}
        before = {case: identity(case) for case in cases}
        adapter = acclimate.adapt(tiny_model(), "tent")
        for case, kind in cases.items():
            for use in (lambda p: write_whole(p, b"x"), adapter.save, adapter.load, read_whole, unet.read):
                with pytest.raises(StateError, match=f"is a {kind}, not a file"):
                    use(case)
            assert identity(case) == before[case]
    assert [inside.name for inside in folder.iterdir()] == ["inside"] and temporaries(tmp_path) == []


@contextlib.contextmanager
def as_somebody():
    """Let the block run without the rights of an administrator."""
    if os.getuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_read_only_files_and_folders_are_refused():
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        folder = Path(name)
        path, closed = folder / "state", folder / "closed"
        path.write_bytes(b"before")
        closed.mkdir()
        path.chmod(0o444)
        folder.chmod(0o777)
        closed.chmod(0o555)
        with as_somebody():
            with pytest.raises(StateError, match="state: the file is read-only"):
                write_whole(path, b"x")
            with pytest.raises(StateError, match=r"Cannot write .*closed/state: Permission denied"):
                write_whole(closed / "state", b"x")
            with pytest.raises(StateError, match=r"Cannot write .*closed/a/b: Permission denied"):
                write_whole(closed / "a" / "b", b"x")
        assert path.read_bytes() == b"before" and sorted(os.listdir(folder)) == ["closed", "state"]
        path.chmod(0o200)
        if os.getuid() == 0:
            os.chown(path, 12345, -1)
        with as_somebody(), pytest.raises(StateError, match=r"Cannot read .*state: Permission denied"):
            read_whole(path)


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 120, "with space\n", "-"])
def test_unusual_names_are_written(tmp_path, name):
    write_whole(tmp_path / name, b"x")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["n" * 256, "zero\0byte"])
def test_impossible_names_are_refused(tmp_path, name):
    for use in (lambda path: write_whole(path, b"x"), read_whole):
        with pytest.raises(StateError, match="Cannot"):
            use(tmp_path / name)


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"before")
    with pytest.raises(StateError, match="No space left"), replacing(path) as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["state"]


def test_a_file_system_without_locks_is_written_too(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / f".old{TEMPORARY}").touch()
    write_whole(tmp_path / "state", b"x")
    assert sorted(os.listdir(tmp_path)) == [f".old{TEMPORARY}", "state"]  # perhaps somebody writes it


def test_a_temporary_file_that_vanishes_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    lock, removed = files._lock, []

    def removing(file, *, wait):
        if wait and not removed:
            removed.extend(temporaries(tmp_path))
            (tmp_path / removed[0]).unlink()
        return lock(file, wait=wait)

    monkeypatch.setattr(files, "_lock", removing)
    write_whole(tmp_path / "state", b"x")
    assert removed and os.listdir(tmp_path) == ["state"]


def test_numbers_of_numpy_can_be_saved(tmp_path):
    import numpy as np

    statefile.write(tmp_path / "s", {}, {"whole": np.int64(3), "real": np.float32(0.5)})
    assert statefile.read(tmp_path / "s")[1] == {"format": 1, "whole": 3, "real": 0.5}
    with pytest.raises(StateError, match="not a number"):
        statefile.write(tmp_path / "s", {}, {"x": object()})
    with pytest.raises(StateError, match="float8"):
        statefile.write(tmp_path / "s", {"x": torch.zeros(2).to(torch.float8_e5m2)}, {})
    assert statefile.read(tmp_path / "s")[1]["whole"] == 3
