"""The journal of a run: the record of every step, and a state from which the run can continue.

The records are flushed to the disk before a state is written, and a state replaces its predecessor atomically. Whenever the
process is killed, the state is therefore whole, and so are the records of all steps that it counts. Records of later steps
are removed, and these steps are repeated. A chain of digests (`chain`) joins the records to each other, to the run, and to
the state.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..core import statefile
from ..core.adapter import Adapter
from ..errors import StateError
from .chain import lost, read_records, seal_record

STEPS, STATE = "steps.jsonl", "state.safetensors"


class Journal:
    """The records and the resumable state of one run.

    Args:
        folder: The folder of the run.
        run: The identifier of the run.
        every: The number of seconds between two states.
    """

    def __init__(self, folder: Path, run: str, every: float = 30.0) -> None:
        self.folder, self.every = folder, every
        self._run = self._digest = run
        self._file: IO[bytes] | None = None
        self._saved = time.monotonic()

    def resume(self, adapter: Adapter) -> Iterator[dict[str, Any]]:
        """Restore the last state of the run in the adapter, and yield the records of the steps up to it, if any."""
        state, steps = self.folder / STATE, self.folder / STEPS
        lines: list[bytes] = []
        if state.exists():
            lines = self._restore(adapter, state, steps)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = steps.open("r+b" if steps.exists() else "w+b")
            self._file.truncate(sum(map(len, lines)))
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise StateError(f"Cannot write {steps}: {error.strerror}.") from error
        yield from map(json.loads, lines)

    def _restore(self, adapter: Adapter, state: Path, steps: Path) -> list[bytes]:
        """Restore the state in the adapter, and return the records that lead to it. Both are checked first."""
        try:
            tensors, header = statefile.read(state)
        except StateError as error:
            raise StateError(f"{str(error).removesuffix('.')}, {lost(self.folder)}") from None
        lines, self._digest = read_records(steps, self._run, header.get("steps"))
        if header.get("note") != self._digest:
            raise StateError(f"{state} does not follow from the lines of {STEPS} beside it, {lost(self.folder)}")
        adapter.resume(state, tensors, header)
        return lines

    def record(self, line: dict[str, Any], adapter: Adapter, *, save: bool = False) -> None:
        """Write the record of a step, and a state if the last one is old or if `save` is true."""
        assert self._file is not None, "resume() opens the journal"
        content, self._digest = seal_record(line, self._digest)
        self._file.write(content)
        self._file.flush()  # other processes read it to show progress
        if save or time.monotonic() - self._saved >= self.every:
            os.fsync(self._file.fileno())
            adapter.save(self.folder / STATE, note=self._digest)
            self._saved = time.monotonic()

    def end(self) -> str:
        """Flush the records to the disk, and return the digest of the last one."""
        assert self._file is not None, "resume() opens the journal"
        os.fsync(self._file.fileno())
        return self._digest

    def close(self, *, finished: bool) -> None:
        """Close the files, and remove the state of a finished run."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if finished:
            (self.folder / STATE).unlink(missing_ok=True)


def steps_of(folder: Path, run: str) -> list[dict[str, Any]]:
    """Return the records of the steps of a finished run, which `run` identifies, after checking them."""
    return [json.loads(line) for line in read_records(folder / STEPS, run)[0]]


def latest_record(folder: Path) -> dict[str, Any] | None:
    """Return the last complete record of a run in progress, or None if there is none."""
    try:
        with (folder / STEPS).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            back = 1 << 12
            while True:
                file.seek(max(0, size - back))
                lines = file.read().split(b"\n")
                if len(lines) > 2 or (back >= size and len(lines) == 2):  # the last line may be incomplete
                    return json.loads(lines[-2])
                if back >= size:
                    return None
                back *= 4
    except (OSError, ValueError):
        return None
