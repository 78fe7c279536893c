"""Streams: many adapted states over one model.

An adapter holds the state of one stream at a time. The states of some others are in memory, and those of the rest in files,
from which they come back bit for bit. All functions but `Stream.summary`, `len`, `has` and `owner` belong to the thread that
owns the adapter.

If several servers share a folder, a stream belongs to the one that took it over last, whose name is in a file beside the
state. A server looks there before it uses or writes a state, and drops what it has of a stream that is no longer its own.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import sys
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor

from ..core import statefile
from ..core.adapter import Adapter, Record
from ..core.files import write_whole
from ..errors import StateError

SUFFIX = ".safetensors"
OWNER = ".owner"
LONGEST_NAME = 150  # of a file, in bytes, before its suffix
KEPT = 120  # records of a stream for the page


class TooManyStreams(StateError):
    """An error about a stream that would exceed the limit on their number or bytes."""


class Stream:
    """One stream: its state unless the adapter has it, and what happened to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: Mapping[str, Tensor] | None = None
        self.snapshot: Mapping[str, Tensor] | None = None
        self.frozen = False
        self.steps = 0
        self.images = self.learned = self.skipped = 0
        self.harm: float | None = None  # the latest estimates
        self.accuracy: float | None = None
        self.used = time.time()
        self.changed: float | None = None  # when the oldest change happened that is not in the file yet
        self.write: Future[None] | None = None
        self.events: deque[str] = deque(maxlen=20)
        self.history: deque[dict[str, float | None]] = deque(maxlen=KEPT)

    def note(
        self, record: Record | None, images: int, *, learned: bool, milliseconds: float, entropy: float = math.nan
    ) -> None:
        """Remember what happened to a batch. `entropy` is that of one that was only predicted."""
        self.used = time.time()
        self.images += images
        harm = None
        if not learned or record is None:
            self.skipped += images
            drift, accuracy = self.history[-1]["drift"] if self.history else None, None  # the parameters are the same
        else:
            self.steps = record.step
            self.learned += record.used
            self.changed = self.changed or self.used
            if record.event is not None:
                self.events.append(f"step {record.step}: {record.event}")
            entropy, drift, accuracy, harm = record.entropy, record.drift, record.estimated_accuracy, record.harm
            self.harm = self.harm if harm is None else harm.estimate
            self.accuracy = self.accuracy if accuracy is None else accuracy
        self.history.append(
            {
                "entropy": entropy if math.isfinite(entropy) else None,
                "drift": drift,
                "accuracy": accuracy,
                "harm": None if harm is None else harm.estimate,
                "harm_low": None if harm is None else harm.low,
                "harm_high": None if harm is None else harm.high,
                "milliseconds": milliseconds,
            }
        )

    def summary(self) -> dict[str, Any]:
        """Return what the live page shows of the stream."""
        return {
            "name": self.name,
            "frozen": self.frozen,
            "images": self.images,
            "learned": self.learned,
            "skipped": self.skipped,
            "steps": self.steps,
            "events": list(self.events),
            "history": list(self.history),
        }


def _says_frozen(header: Mapping[str, Any]) -> bool:
    return header.get("note") == "frozen"


def _locked(folder: Path, shared: bool) -> int | None:
    """Return a descriptor that keeps servers away from a folder which would overwrite each other's states.

    The system unlocks the folder when the descriptor is closed, also if the process is killed.

    Raises:
        StateError: If another server uses the folder.
    """
    if sys.platform == "win32":
        return None  # Windows cannot open a folder
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StateError(f"{folder}: another server keeps its states in this folder.") from None
    except OSError:
        pass  # a network drive without locks
    return descriptor


class Streams:
    """The streams of one adapter.

    Args:
        adapter: The adapter, as it was wrapped: that is how a new stream begins.
        folder: The folder of the files. Without one, a stream that leaves the memory is lost.
        resident: Number of streams that are kept in memory.
        most: Number of streams in memory and in files.
        most_bytes: Bytes of all files, beyond which there are no new streams; None for any.
        age: Seconds without a request after which a stream is removed; None for never.
        interval: Seconds after which a change is written to the file of its stream.
        shared: Whether other servers use the folder too.
    """

    def __init__(
        self,
        adapter: Adapter,
        folder: str | os.PathLike[str] | None = None,
        *,
        resident: int = 64,
        most: int = 10_000,
        most_bytes: int | None = None,
        age: float | None = None,
        interval: float = 5.0,
        shared: bool = False,
    ) -> None:
        self.adapter = adapter
        self.folder = None if folder is None else Path(folder)
        self._lock: int | None = None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder, shared)
        self.resident, self.most, self.most_bytes, self.age, self.interval = resident, most, most_bytes, age, interval
        self.me = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}" if shared else None  # None: nobody else is here
        self.known: OrderedDict[str, Stream] = OrderedDict()  # those in memory, the least recently used first
        self._files = set(self._found())
        self.failures = 0  # of writes, which are then repeated
        self.failure: BaseException | None = None  # the latest of them, until somebody has told it
        self._current: Stream | None = None
        self._header = adapter.header()
        self._bytes = sum(tensor.nbytes for tensor in adapter.state_dict().values())
        self._writer = ThreadPoolExecutor(1, "state-writer")

    def __len__(self) -> int:
        return len(self._files | {self._file(name) for name in list(self.known)})  # which other threads may call

    def get(self, name: str) -> Stream:
        """Return a stream, whose state the adapter then has."""
        self._require_room(name)
        if not self._claim(name) and name in self.known:
            self._forget(self.known[name])
        stream = self.known.get(name)
        if stream is None:
            stream = Stream(name)
            read = self._read(name)
            self._leave()
            if read is None:
                self.adapter.reset()
            else:
                self.adapter.resume(f"The file of the stream {name!r}", *read)
                stream.frozen = _says_frozen(read[1])
                stream.steps = int(self.adapter.steps)
            self.known[name] = self._current = stream
        elif stream is not self._current:
            tensors = stream.tensors
            assert tensors is not None, "only the current stream has its state in the adapter"
            self._leave()
            self.adapter.load_state_dict(tensors)
            stream.tensors, self._current = None, stream
        self.known.move_to_end(name)
        for other in [*self.known.values()][: max(0, len(self.known) - self.resident)]:
            try:
                self._evict(other)
            except (OSError, StateError) as error:  # for example a full disk: it stays in memory until it can be written
                self._note_failure(other, error)
        return stream

    def _require_room(self, name: str) -> None:
        """Refuse a new stream that would exceed a limit."""
        if self.has(name) or (len(self) < self.most and self.most_bytes is None):
            return
        found = self._found()
        self._files = set(found)  # other servers may have removed some
        if len(self) >= self.most:
            raise TooManyStreams(f"There are {self.most} streams already.")
        size = max([self._bytes, *found.values()])  # of a state that has no file yet
        if self.most_bytes is not None and sum(found.values()) + (len(self) - len(found) + 1) * size > self.most_bytes:
            raise TooManyStreams(f"The states of all streams would have more than {self.most_bytes} bytes.")

    def _leave(self) -> None:
        """Take the state of the current stream out of the adapter."""
        if self._current is not None:
            self._current.tensors = self.adapter.state_dict()
            self._current = None

    def _evict(self, stream: Stream) -> None:
        self._flush(stream)
        self._forget(stream)

    def _note_failure(self, stream: Stream, error: BaseException) -> None:
        """Let the state of a stream that could not be written be written again, after a while."""
        self.failures, self.failure = self.failures + 1, error
        stream.write, stream.changed = None, time.time()

    def _forget(self, stream: Stream) -> None:
        del self.known[stream.name]
        if stream is self._current:
            self._current = None

    def release(self, name: str) -> None:
        """Write the state of a stream and forget it, because another server takes it over."""
        if name in self.known:
            self._evict(self.known[name])

    def remove(self, name: str) -> None:
        """Forget a stream, and remove its file."""
        stream = self.known.get(name)
        if stream is not None:
            self._forget(stream)
            if stream.write is not None:
                wait([stream.write])
        self._remove_file(self._file(name))

    def restart(self, name: str) -> None:
        """Let a stream begin with the source model. A frozen one stays frozen, which no request for predictions changes."""
        frozen = self._is_frozen(name)
        self.remove(name)
        if frozen:
            self.freeze(name, True)

    def _is_frozen(self, name: str) -> bool:
        if name in self.known:
            return self.known[name].frozen
        try:
            read = self._read(name)
        except StateError:  # a damaged file
            return False
        return read is not None and _says_frozen(read[1])

    def _remove_file(self, file: str) -> None:
        if self.folder is not None:
            (self.folder / file).unlink(missing_ok=True)
            (self.folder / (file + OWNER)).unlink(missing_ok=True)
            self._files.discard(file)

    def has(self, name: str) -> bool:
        """Return whether there is a stream of this name."""
        if name in self.known or self.folder is None:
            return name in self.known
        file = self._file(name)
        return file in self._files if self.me is None else (self.folder / file).exists()

    def owner(self, name: str) -> str | None:
        """Return the server that a stream belongs to, if several share the folder."""
        if self.folder is None:
            return None
        try:
            return (self.folder / (self._file(name) + OWNER)).read_text()
        except FileNotFoundError:
            return None

    def _is_mine(self, name: str) -> bool:
        return self.me is None or self.owner(name) == self.me

    def _claim(self, name: str) -> bool:
        """Make a stream this server's own, and return whether it was that before."""
        if self.me is None or self.folder is None:
            return True
        mine, file = self._is_mine(name), self.folder / (self._file(name) + OWNER)
        if mine:
            os.utime(file)  # for the limit on age
        else:
            write_whole(file, self.me.encode())
        return mine

    def reset(self, name: str) -> None:
        """Return a stream to the source model."""
        stream = self.get(name)
        self.adapter.reset()
        self._note_change(stream)

    def take_snapshot(self, name: str) -> None:
        """Remember the state of a stream for `rollback`, as long as the stream is in memory."""
        self.get(name).snapshot = self.adapter.state_dict()

    def rollback(self, name: str) -> None:
        """Return a stream to its snapshot."""
        stream = self.get(name)
        if stream.snapshot is None:
            raise StateError(f"The stream {name!r} has no snapshot in memory to roll back to.")
        self.adapter.load_state_dict(stream.snapshot)
        self._note_change(stream)

    def _note_change(self, stream: Stream) -> None:
        """Note that the adapter has got another state of a stream, about which nothing is known yet."""
        stream.steps, stream.harm, stream.accuracy = int(self.adapter.steps), None, None
        stream.history.clear()
        stream.changed = stream.changed or time.time()

    def freeze(self, name: str, frozen: bool) -> None:
        """Let a stream only predict, or learn again."""
        stream = self.get(name)
        stream.frozen, stream.changed = frozen, stream.changed or time.time()

    def replace(self, name: str, content: bytes) -> None:
        """Let a stream continue from the content of a state file. If that cannot be used, nothing changes."""
        tensors, header = statefile.parse("The state", content)
        new = not self.has(name)
        stream = self.get(name)
        try:
            self.adapter.resume("The state", tensors, header)
        except StateError:
            if new:
                self.remove(name)
            raise
        stream.frozen = _says_frozen(header)
        self._note_change(stream)

    def content(self, name: str) -> bytes:
        """Return the content of a state file of the stream as it is now."""
        stream = self.get(name)
        if self.folder is None:
            raise StateError("The server has no folder for states: start it with --states DIR.")
        stream.changed = stream.changed or time.time()
        self._flush(stream)
        return (self.folder / self._file(name)).read_bytes()

    def write_due(self) -> None:
        """Begin to write the states that have been changed for long enough, and remove streams that are too old."""
        for stream in list(self.known.values()):
            if stream.write is not None and stream.write.done():
                error = stream.write.exception()
                if error is not None:
                    self._note_failure(stream, error)
                stream.write = None
            now = time.time()
            if stream.write is None and stream.changed is not None and now - stream.changed >= self.interval:
                self._begin_write(stream)
            if self.age is not None and now - stream.used > self.age:
                if self._is_mine(stream.name):
                    self.remove(stream.name)
                else:
                    self._forget(stream)
        if self.age is not None and self.folder is not None:
            now = time.time()
            for file in sorted(self._files - {self._file(name) for name in self.known}):
                if now - self._last_used(self.folder / file) > self.age:
                    self._remove_file(file)

    def _last_used(self, path: Path) -> float:
        """Return when a state was last written or, if servers share it, last used; 0 if it is gone."""
        files = [path, path.with_name(path.name + OWNER)] if self.me is not None else [path]
        return max((os.path.getmtime(file) for file in files if file.exists()), default=0.0)

    def close(self) -> list[Exception]:
        """Write all states, wait until that is done, and return the errors of those that could not be written."""
        errors: list[Exception] = []
        for stream in self.known.values():
            try:
                self._flush(stream)
            except (OSError, StateError) as error:
                errors.append(error)
        self._writer.shutdown()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        return errors

    def _begin_write(self, stream: Stream) -> None:
        if self.folder is None:
            stream.changed = None
            return
        tensors = self.adapter.state_dict() if stream is self._current else stream.tensors
        assert tensors is not None, "a stream in memory has a state"
        header = {**self._header, "steps": int(tensors["steps"]), "note": "frozen" if stream.frozen else None}
        self._files.add(self._file(stream.name))
        stream.changed = None
        stream.write = self._writer.submit(self._write, self.folder, stream.name, tensors, header)

    def _write(self, folder: Path, name: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        if self._is_mine(name):  # otherwise another server has a newer state
            statefile.write(folder / self._file(name), tensors, header)

    def _flush(self, stream: Stream) -> None:
        """Write the state of a stream if it has changed, and wait for it."""
        if stream.changed is not None:
            self._begin_write(stream)
        if stream.write is not None:
            stream.write.result()

    def _read(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if self.folder is None or not self.has(name):
            return None
        path = self.folder / self._file(name)
        try:
            return statefile.read(path)
        except StateError as error:  # clients need not know where the file is
            raise StateError(str(error).replace(str(path), f"The file of the stream {name!r}")) from error

    def _found(self) -> dict[str, int]:
        """Return the bytes of every file."""
        sizes = {}
        for file in [] if self.folder is None else self.folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):  # another server has removed it
                sizes[file.name] = file.stat().st_size
        return sizes

    def _file(self, name: str) -> str:
        """Return the name of the file of a stream: its own name, or a digest if that would be too long."""
        plain = quote(name, safe="").replace(".", "%2E")
        long = len(plain) > LONGEST_NAME
        return (f"~{hashlib.sha256(name.encode()).hexdigest()}" if long else plain) + SUFFIX
