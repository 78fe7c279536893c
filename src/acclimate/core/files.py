"""Functions that read and write whole files, also while other processes write the same file."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from ..errors import StateError

TEMPORARY = ".acclimate-tmp"  # how the names of temporary files end, by which abandoned ones are recognised
ATTEMPTS = 20  # to read a file that is being changed
Version = tuple[int, ...]  # changes whenever a file is replaced or overwritten


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Let the block write a temporary file, which replaces `path` atomically if the block succeeds.

    Even after a crash, `path` holds either its previous content or the whole new file. The temporary file of a process that
    was killed is removed when any file is next written in the same folder. A link stays, and the file that it points to is
    replaced. An existing file keeps its permissions, and its owner where the system allows that.

    Raises:
        StateError: If the file cannot be written, or if `path` is a folder, a device, a pipe or a socket.
    """
    try:
        target = Path(os.path.realpath(path))
        existing = _existing(path, target)
        _remove_abandoned(target.parent)
        temporary, file = _create(target, 0o666 if existing is None else 0o600)
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise StateError(f"Cannot write {path}: {getattr(error, 'strerror', None) or error}.") from error
    try:
        with file:
            yield file
            file.flush()
            if existing is not None:
                _take_over(temporary, existing)
            os.fsync(file.fileno())
            if sys.platform == "win32":
                file.close()  # Windows does not rename an open file
            os.replace(temporary, target)
        _flush_folder(target.parent)
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
    with replacing(path) as file:
        file.write(content)


def read_whole(path: Path) -> tuple[bytes, Version]:
    """Return the content of a file, and the version that it had when the reading began.

    The content is read from one open file. It is therefore whole if other processes replace the file meanwhile, but not if
    they overwrite it in place: then `file_version` is another one afterwards.

    Raises:
        StateError: If the file cannot be read, or if `path` is a folder, a device, a pipe or a socket.
    """
    for attempt in range(ATTEMPTS):
        try:
            require_regular(path, path.stat())
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                return file.read(), _version(about)
        except FileNotFoundError as error:
            raise StateError(f"{path} does not exist.") from error
        except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
            if getattr(error, "errno", None) == errno.ESTALE and attempt + 1 < ATTEMPTS:
                continue  # another machine replaced the file on a network drive: open the new one
            raise StateError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error
    raise AssertionError("the last attempt returns or raises")


def file_version(path: Path) -> Version | None:
    """Return the current version of a file, or None if there is none."""
    try:
        return _version(path.stat())
    except OSError:
        return None


def _version(about: os.stat_result) -> Version:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def require_regular(path: Path, about: os.stat_result) -> None:
    """Refuse a folder, a device, a pipe and a socket: opening one could wait forever, or destroy something."""
    if not stat.S_ISREG(about.st_mode):
        raise StateError(f"{path} is a {_kind(about.st_mode)}, not a file: give the name of a file.")


def _kind(mode: int) -> str:
    names = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return names.get(stat.S_IFMT(mode), "device")


def _existing(path: Path, target: Path) -> os.stat_result | None:
    """Return what is known of the file that will be replaced, or None if there is none yet."""
    try:
        about = target.stat()
    except FileNotFoundError:
        return None
    require_regular(path, about)
    if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise StateError(f"Cannot write {path}: the file is read-only.")
    return about


def _create(target: Path, mode: int) -> tuple[Path, BinaryIO]:
    """Create a temporary file beside the target, and lock it, so that other processes know that its writer lives."""
    while True:
        temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}{TEMPORARY}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        file = os.fdopen(os.open(temporary, flags, mode), "wb")
        _lock(file, wait=True)
        if os.path.lexists(temporary):
            return temporary, file
        file.close()  # another process removed it before it was locked


_next_search: dict[Path, float] = {}  # the time before which a folder is not searched again


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files whose writers were killed.

    A folder may have many files, and many may be written to it: the search takes at most a tenth of the time.
    """
    start = time.monotonic()
    if start < _next_search.get(folder, 0.0):
        return
    with suppress(OSError):  # a folder that cannot be listed may still be written to
        for name in os.listdir(folder):
            if name.endswith(TEMPORARY):
                _remove_if_abandoned(folder / name)
    end = time.monotonic()
    _next_search[folder] = end + 10 * (end - start)


def _remove_if_abandoned(temporary: Path) -> None:
    """Remove a temporary file unless its writer lives: then the writer has locked it."""
    with suppress(OSError):  # it is gone, or belongs to somebody else
        if sys.platform == "win32":
            temporary.unlink()  # fails while the writer has the file open
            return
        with os.fdopen(os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and _lock(file, wait=False):
                temporary.unlink()


def _lock(file: BinaryIO, *, wait: bool) -> bool:
    """Lock a file until it is closed, and return whether that succeeded. The system unlocks it when the process ends."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has locked it, or the file system has no locks
        return False
    return True


def _take_over(temporary: Path, existing: os.stat_result) -> None:
    """Give a temporary file the owner and the permissions of the file that it will replace."""
    if sys.platform != "win32":
        for owner, group in ((-1, existing.st_gid), (existing.st_uid, -1)):
            with suppress(PermissionError):  # only an administrator may give a file away
                os.chown(temporary, owner, group)
    temporary.chmod(stat.S_IMODE(existing.st_mode))


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


def _flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk."""
    if sys.platform == "win32":
        return  # Windows cannot open a folder, and needs no such flush
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
