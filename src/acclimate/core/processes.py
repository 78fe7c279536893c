"""Processes that end with the process that started them, and Ctrl-C that waits for the end of a step.

A process that is killed cannot tell others to end. Those that it started have to notice it by themselves. Otherwise they
would compute for nobody, and keep the files locked that a new process waits for.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

MOST_PROCESSES = 1024  # or threads: with many more, the system ends a process without a word
GRACE_SECONDS = 2.0  # for the current step of a run that is interrupted, and for saving its state
POLL_SECONDS = 1.0  # between two looks at the parent


def end_with_parent(number: int = 0) -> None:
    """Let this process end when the process that started it ends. `number` is what torch passes to a loader of images."""
    when_parent_ends(lambda: os._exit(1))


def when_parent_ends(act: Callable[[], None], stop: Connection | None = None) -> None:
    """Call a function in a thread when the process that started this one ends, or closes its end of the pipe `stop`."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    started_by = parent.pid

    def watch() -> None:
        while os.getppid() == started_by and not _closed(stop):
            pass
        act()

    threading.Thread(target=watch, daemon=True, name="acclimate-parent").start()


def _closed(stop: Connection | None) -> bool:
    """Return whether a pipe is closed, after some time if it is not."""
    if stop is None:
        time.sleep(POLL_SECONDS)
        return False
    return stop.poll(POLL_SECONDS)


ENDING = threading.Event()  # whether this process will end soon


def end_soon() -> None:
    """Let the run in this process end after its current step, and end the process in any case."""
    ENDING.set()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


@contextmanager
def finishing_steps() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C inside the block wait for the current step, so that its state can be saved.

    The value is a function that returns whether to save the state and to end. A step that takes long is interrupted after
    two seconds, or by a second Ctrl-C.
    """
    interrupted = threading.Event()
    main = threading.main_thread()
    if threading.current_thread() is not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield ENDING.is_set  # Ctrl-C interrupts another thread, or is the business of somebody else
        return

    def interrupt(number: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()
        again.start()

    again = threading.Timer(GRACE_SECONDS, _interrupt, [main.ident])
    again.daemon = True
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: interrupted.is_set() or ENDING.is_set()
        if interrupted.is_set():
            raise KeyboardInterrupt
    finally:
        again.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(thread: int) -> None:
    """Interrupt a thread as Ctrl-C does, also if it waits for the system."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(thread, signal.SIGINT)
    else:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C inside the block. A process that is started there never gets it: its parent tells it to end."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
