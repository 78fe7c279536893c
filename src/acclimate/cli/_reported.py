"""What the user sees of an exception: one sentence, and an exit code.

| code | meaning |
|---|---|
| 0 | done |
| 1 | the machine could not do it (a full disk, too little memory), or a check has failed |
| 2 | the command is at fault: an argument, a file, a model |
| 130 | interrupted by Ctrl-C |
| 141 | the reader of the output has gone, as in `acclimate methods | head -1` |

Any other exception is a bug, and is shown with its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ..errors import AcclimateError, first_line

MACHINE, COMMAND, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
# errors of the system that no other argument would avoid
ENVIRONMENT = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK}
SHORT = ("out of memory", "can't allocate memory", "not enough memory", "Unable to allocate", "can't start new thread")


@dataclass
class Outcome:
    """The exit code of a command."""

    code: int = 0


@contextmanager
def reported() -> Iterator[Outcome]:
    """Turn an exception inside the block into a sentence for the user, and into an exit code."""
    outcome = Outcome()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to fail
    try:
        try:
            yield outcome
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where an error can be told; the interpreter would only complain
    except KeyboardInterrupt:
        outcome.code = INTERRUPTED
        _say("\nacclimate: interrupted. Finished work is kept, and the same command continues from there.")
    except BrokenPipeError:
        outcome.code = PIPE_CLOSED
        _leave_output()
    except (AcclimateError, OSError, MemoryError, UnicodeError, RuntimeError) as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        outcome.code = MACHINE if _of_the_machine(error) else COMMAND
        _leave_output()
        _say(f"acclimate: {sentence}")


def _sentence(error: BaseException) -> str | None:
    """Return what to tell the user, or None if the exception is a bug."""
    if isinstance(error, AcclimateError):
        return str(error)
    if _short(error):
        return f"The machine is short of memory or processes ({first_line(error) or type(error).__name__})."
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{where}{error.strerror or first_line(error) or type(error).__name__}."
    if isinstance(error, UnicodeError):
        return f"A name or a text is not UTF-8 ({first_line(error)})."
    return None


def _of_the_machine(error: BaseException) -> bool:
    """Return whether an error is not the fault of the command. Errors of this library quote the system."""
    if isinstance(error, OSError):
        return error.errno in ENVIRONMENT
    return _short(error) or any(os.strerror(number) in str(error) for number in ENVIRONMENT)


def _short(error: BaseException) -> bool:
    """Return whether memory or threads are short. torch and Python say so by a RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in SHORT)
    )


def _leave_output() -> None:
    """Discard what is left in the buffer of the output, where it cannot be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with suppress(OSError, io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
