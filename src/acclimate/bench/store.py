"""Results on disk: one folder for each run, and a result in it only once the run is complete."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from ..errors import StateError
from .run import Result
from .spec import Spec

FILE = "result.json"


class Store:
    """The folder in which finished runs are kept.

    Args:
        root: Created when the first result is written.
    """

    def __init__(self, root: str | os.PathLike[str] = "runs") -> None:
        self.root = Path(root)

    def find(self, spec: Spec) -> Result | None:
        """The result of this run, if it was finished before."""
        path = self.root / spec.folder / FILE
        if not path.exists():
            return None
        try:
            return Result(**json.loads(path.read_text())["result"])
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{path} is not a result of this version ({error}): remove it, and the run is run again."
            ) from None

    def write(self, spec: Spec, result: Result) -> Path:
        """Keep a result. It appears whole or not at all."""
        path = self.root / spec.folder / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}.tmp")
        half.write_text(json.dumps({"spec": asdict(spec), "result": asdict(result)}, indent=1))
        os.replace(half, path)
        return path
