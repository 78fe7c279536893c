"""Functions that write files atomically: a file appears whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ..errors import StateError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Let the block write a temporary file, which replaces `path` atomically if the block succeeds.

    Even after a crash, `path` holds either its previous content or the whole new file.

    Raises:
        StateError: If the file cannot be written.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise StateError(f"Cannot write {path}: {error.strerror}.") from error
    temporary = Path(name)
    try:
        os.close(descriptor)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # temporary files are private; a saved file gets the usual permissions
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StateError(f"Cannot write {path}: {error.strerror or error}.") from error
        raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, and create the folders above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"Cannot write {path}: {error.strerror}.") from error
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the content of a file. It is computed only once unless the file changes."""
    about = path.stat()
    return _digest(path, about.st_size, about.st_mtime_ns)


@cache
def _digest(path: Path, size: int, changed: int) -> str:
    content = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            content.update(block)
    return content.hexdigest()[:16]


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder, and needs no such flush
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
