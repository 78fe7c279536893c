"""Runs on disk: each has a folder, which contains a result when the run is complete.

| file | written | content |
|---|---|---|
| `spec.json` | first | the specification |
| `steps.jsonl` | after every step | the record of each step, with the scores of each image |
| `state.safetensors` | every 30 seconds | a state from which the run can continue; removed at the end |
| `result.json` | last, atomically | the result and the specification |

A result is read only together with its steps, and only if nothing in either was changed: see `chain`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..core.digests import digest_json
from ..core.files import write_whole
from ..errors import StateError
from .chain import KEY, lost, read_records, seal_result
from .journal import STATE, STEPS, Journal
from .run import Result
from .spec import Spec

SPEC, RESULT, LOCK = "spec.json", "result.json", ".lock"


@dataclass(frozen=True)
class Outcome:
    """A run and its result."""

    spec: Spec
    result: Result
    found: bool = False  # whether it was in the store before
    folder: Path | None = field(default=None, compare=False)  # None if the run was not kept


class Store:
    """A folder in which runs are stored.

    Args:
        root: The folder, which is created when it is needed.
        every: The number of seconds between two states of a run, which is the time that may be lost if a process is killed.
    """

    def __init__(self, root: str | os.PathLike[str] = "runs", *, every: float = 30.0) -> None:
        self.root, self.every = Path(root), every

    def prepare(self) -> None:
        """Check that results can be written, before the first run begins."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            raise StateError(f"Results cannot be kept in {self.root}: {error.strerror}. Give another folder.") from None

    def folder(self, spec: Spec) -> Path:
        """Return the folder of a run."""
        return self.root / spec.folder

    def find(self, spec: Spec) -> Result | None:
        """Return the result of a run, or None if the run is not finished. A result that was changed is refused."""
        path = self.folder(spec) / RESULT
        return _read(path).result if path.exists() else None

    def outcomes(self) -> list[Outcome]:
        """Return all finished runs in this folder and its sub-folders. A result that was changed is refused."""
        if not self.root.is_dir():
            raise StateError(f"{self.root} is not a folder of runs; `acclimate bench --out {self.root}` would make one.")
        return [_read(path) for path in sorted(self.root.rglob(RESULT))]

    @contextmanager
    def claim(self, spec: Spec) -> Iterator[Journal]:
        """Let one process at a time into the block, with the journal of a run.

        A second process waits, and then finds the result.
        """
        folder = self.folder(spec)
        write_whole(folder / SPEC, json.dumps(asdict(spec), indent=1).encode())
        journal = Journal(folder, spec.id, self.every)
        with _alone(folder / LOCK):
            finished = False
            try:
                yield journal
                finished = (folder / RESULT).exists()
            finally:
                journal.close(finished=finished)

    def write(self, spec: Spec, result: Result, journal: Journal) -> None:
        """Write the result of a run with a journal atomically. It is on the disk when this function returns."""
        content = {"card": spec.card, "spec": asdict(spec), "result": result.to_json(), "digest": result.digest}
        sealed = seal_result(content, journal.end())
        write_whole(self.folder(spec) / RESULT, json.dumps(sealed, indent=1, allow_nan=False).encode())

    def forget(self, spec: Spec) -> None:
        """Remove the result and the state of a run, so that it starts from the beginning."""
        for name in (RESULT, STATE):
            (self.folder(spec) / name).unlink(missing_ok=True)


def _read(path: Path) -> Outcome:
    """Read a result, and check it against its steps and the name of its folder."""
    folder = path.parent
    try:
        sealed = json.loads(path.read_bytes())
        run, content = digest_json(sealed["spec"]), {key: value for key, value in sealed.items() if key != KEY}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"{path} cannot be read ({error}), {lost(folder)}") from None
    if seal_result(content, read_records(folder / STEPS, run)[1]) != sealed:
        raise StateError(f"{path} is not what the run wrote, {lost(folder)}")
    try:
        spec, result = Spec.from_json(content["spec"]), Result.from_json(content["result"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path} is of another version of acclimate ({error}), {lost(folder)}") from None
    if Path(os.path.abspath(folder)).name != spec.folder:
        raise StateError(f"{path} is the result of another run: rename {folder} to {spec.folder}, or remove it.")
    return Outcome(spec, result, True, folder)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Keep a file locked inside the block. The system releases the lock when the process ends for any reason."""
    try:
        import fcntl
    except ImportError:  # on Windows there is no lock
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
