"""Results on disk: one folder for each run, and a result in it only once the run is complete."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

from .._files import write_whole
from ..errors import StateError
from .run import Result
from .spec import Spec

FILE = "result.json"


class Store:
    """The folder in which finished runs are kept.

    Args:
        root: A folder, made when it is needed.
    """

    def __init__(self, root: str | os.PathLike[str] = "runs") -> None:
        self.root = Path(root)

    def prepare(self) -> None:
        """Make sure that results can be kept, before the first run is begun."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not os.access(self.root, os.W_OK):
                raise PermissionError(13, "not writable")
        except OSError as error:
            raise StateError(f"Results cannot be kept in {self.root}: {error.strerror}. Give another folder.") from None

    def find(self, spec: Spec) -> Result | None:
        """The result of this run, if it was finished before."""
        path = self.root / spec.folder / FILE
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_text())["result"]
            pairs = {name: [tuple(pair) for pair in values[name]] for name in ("events", "curve")}
            nll = math.inf if values["nll"] is None else values["nll"]
            return Result(**{**values, **pairs, "nll": nll})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{path} is not a result of this version ({error}): remove it, and it is run again.") from None

    def write(self, spec: Spec, result: Result) -> Path:
        """Keep a result. It appears whole or not at all."""
        path = self.root / spec.folder / FILE
        values = asdict(result) | {"nll": result.nll if math.isfinite(result.nll) else None}  # JSON has no infinity
        write_whole(path, json.dumps({"spec": asdict(spec), "result": values}, indent=1, allow_nan=False).encode())
        return path
