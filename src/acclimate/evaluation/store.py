"""Runs on disk: a folder for each, and a result in it only once the run is complete.

| file | written | holds |
|---|---|---|
| `spec.json` | first | all that decides the result |
| `steps.jsonl` | with every step | what happened in it, image by image |
| `state.safetensors` | every half minute | what the run needs to go on; gone at the end |
| `result.json` | last, in one go | the result, and again all that decides it |
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..core.files import write_whole
from ..errors import StateError
from .journal import STATE, Journal
from .run import Result
from .spec import Spec

SPEC, RESULT, LOCK = "spec.json", "result.json", ".lock"


@dataclass(frozen=True)
class Outcome:
    """A run and its result."""

    spec: Spec
    result: Result
    found: bool = False  # in the store, from an earlier call
    folder: Path | None = field(default=None, compare=False)  # where it was read from


class Store:
    """The folder in which runs are kept.

    Args:
        root: A folder, made when it is needed.
        every: Seconds between two states of a run: what a kill may cost.
    """

    def __init__(self, root: str | os.PathLike[str] = "runs", *, every: float = 30.0) -> None:
        self.root, self.every = Path(root), every

    def prepare(self) -> None:
        """Make sure that results can be kept, before the first run is begun."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            raise StateError(f"Results cannot be kept in {self.root}: {error.strerror}. Give another folder.") from None

    def folder(self, spec: Spec) -> Path:
        return self.root / spec.folder

    def find(self, spec: Spec) -> Result | None:
        """The result of this run, if it was finished before."""
        path = self.folder(spec) / RESULT
        return _read(path).result if path.exists() else None

    def outcomes(self) -> list[Outcome]:
        """All finished runs, here and in sub-folders."""
        if not self.root.is_dir():
            raise StateError(f"{self.root} is not a folder of runs; `acclimate bench --out {self.root}` would make one.")
        return [_read(path) for path in sorted(self.root.rglob(RESULT))]

    @contextmanager
    def claim(self, spec: Spec) -> Iterator[Journal]:
        """The run's journal, for one process at a time: a second one waits here, and then finds the result."""
        folder = self.folder(spec)
        write_whole(folder / SPEC, json.dumps(asdict(spec), indent=1).encode())
        journal = Journal(folder, self.every)
        with _alone(folder / LOCK):
            try:
                yield journal
            finally:
                journal.close(finished=(folder / RESULT).exists())

    def write(self, spec: Spec, result: Result) -> Path:
        """Keep a result. It appears whole or not at all."""
        path = self.folder(spec) / RESULT
        content = {"card": spec.card, "spec": asdict(spec), "result": result.to_json(), "digest": result.digest}
        write_whole(path, json.dumps(content, indent=1, allow_nan=False).encode())
        return path

    def forget(self, spec: Spec) -> None:
        """Remove what there is of a run, so that it is run from its beginning."""
        for name in (RESULT, STATE):
            (self.folder(spec) / name).unlink(missing_ok=True)


def _read(path: Path) -> Outcome:
    try:
        content = json.loads(path.read_text())
        return Outcome(Spec.from_json(content["spec"]), Result.from_json(content["result"]), True, path.parent)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} is not a result of this version ({error}): remove it, and it is run again.") from None


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock that the system takes back whenever the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes that share a run are not kept apart
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
