"""A run on disk while it runs: what happened in every step, and a state to go on from.

Both are only ever ahead of, or equal to, what the state says: the steps are flushed to the disk before the state is
written, and the state replaces its predecessor in one go. So whatever kills the process, the state and as many steps as it
counts are whole; what lies beyond them is cut off, and done again.
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
        folder: The run's own.
        every: Seconds between two states.
    """

    def __init__(self, folder: Path, every: float = 30.0) -> None:
        self.folder, self.every = folder, every
        self._file: IO[bytes] | None = None
        self._saved = time.monotonic()

    def resume(self, adapter: Adapter) -> Iterator[dict[str, Any]]:
        """Bring the adapter to where the run stopped, and give the steps up to there; nothing if it has not begun."""
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

    def note(self, line: dict[str, Any], adapter: Adapter) -> None:
        """Write a step down, and from time to time a state."""
        assert self._file is not None, "resume() opens the journal"
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()  # so that others can watch the run
        if time.monotonic() - self._saved >= self.every:
            os.fsync(self._file.fileno())
            adapter.save(self.folder / STATE)
            self._saved = time.monotonic()

    def close(self, *, finished: bool) -> None:
        """A finished run needs no state."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if finished:
            (self.folder / STATE).unlink(missing_ok=True)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """What a finished run has written down, step by step; nothing if it is not there."""
    try:
        with (folder / STEPS).open("rb") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StateError(f"{folder / STEPS} cannot be read ({error}): remove {folder}, and the run starts afresh.") from None


def latest(folder: Path) -> dict[str, Any] | None:
    """The last whole step that a run has written down, if there is one; for those who watch it."""
    try:
        with (folder / STEPS).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            back = 1 << 12
            while True:
                file.seek(max(0, size - back))
                lines = file.read().split(b"\n")
                if len(lines) > 2 or (back >= size and len(lines) == 2):  # the last is what is being written
                    return json.loads(lines[-2])
                if back >= size:
                    return None
                back *= 4
    except (OSError, ValueError):
        return None
