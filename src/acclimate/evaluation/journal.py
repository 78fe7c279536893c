"""The journal of a run: the record of every step, and a state from which the run can continue.

The records are flushed to the disk before a state is written, and a state replaces its predecessor atomically. Whenever the
process is killed, the state is therefore whole, and so are the records of all steps that it counts. Records of later steps
are removed, and these steps are repeated.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..core.adapter import Adapter
from ..errors import StateError

STEPS, STATE = "steps.jsonl", "state.safetensors"


class Journal:
    """The records and the resumable state of one run.

    Args:
        folder: The folder of the run.
        every: The number of seconds between two states.
    """

    def __init__(self, folder: Path, every: float = 30.0) -> None:
        self.folder, self.every = folder, every
        self._file: IO[bytes] | None = None
        self._saved = time.monotonic()

    def resume(self, adapter: Adapter) -> Iterator[dict[str, Any]]:
        """Restore the last state of the run in the adapter, and yield the records of the steps up to it, if any."""
        state, steps = self.folder / STATE, self.folder / STEPS
        lines: list[bytes] = []
        if state.exists():
            adapter.load(state)
            with steps.open("rb") as file:
                lines = [line for line, _ in zip(file, range(int(adapter.steps)))]
            if len(lines) < int(adapter.steps) or not lines[-1].endswith(b"\n"):
                raise StateError(
                    f"{steps} lacks steps that {state} counts: remove {self.folder}, and the run starts afresh."
                )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = steps.open("r+b" if steps.exists() else "w+b")
            self._file.truncate(sum(map(len, lines)))
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise StateError(f"Cannot write {steps}: {error.strerror}.") from error
        yield from map(json.loads, lines)

    def record(self, line: dict[str, Any], adapter: Adapter) -> None:
        """Write the record of a step, and a state if the last one is old."""
        assert self._file is not None, "resume() opens the journal"
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()  # other processes read it to show progress
        if time.monotonic() - self._saved >= self.every:
            os.fsync(self._file.fileno())
            adapter.save(self.folder / STATE)
            self._saved = time.monotonic()

    def close(self, *, finished: bool) -> None:
        """Close the files, and remove the state of a finished run."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if finished:
            (self.folder / STATE).unlink(missing_ok=True)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the steps of a finished run, or an empty list if there are none."""
    try:
        with (folder / STEPS).open("rb") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StateError(f"{folder / STEPS} cannot be read ({error}): remove {folder}, and the run starts afresh.") from None


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
