"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import StateError


def write_whole(file: Path, content: bytes) -> None:
    """Write a file, and the folders above it, so that nobody ever sees a part of it."""
    half = file.with_name(f".{file.name}.{os.getpid()}.half")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(content)
        os.replace(half, file)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise StateError(f"Cannot write {file}: {error.strerror}.") from error
