"""Reply first: the logits of a batch leave a step in its middle, and the rest of the step runs behind them.

The predictions of most methods come from before the update. A caller can therefore have them after one forward pass, while
the backward pass, the update and the guard follow in a thread of the adapter. This thread holds the lock of the adapter
until its step has ended. So whatever needs the state waits for the step: the next call, `save`, `snapshot`, `record`.

A `Budget` says which batches are learned from at all. The others are only predicted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context

import torch
from torch import Tensor

from ..errors import ConfigError, ConformanceError, require_between
from .microbatches import compute_on

WORKERS = "acclimate"  # begins the names of the threads in which steps are made
LATE = "skipped: the step before it was late"
NOT_DUE = "skipped: over the budget"


class Abandoned(Exception):
    """The caller of a step was interrupted before it had its logits, so that the step must not happen."""


class Reply:
    """The reply to one call: its logits, which leave at most once.

    Args:
        early: Whether the logits of the first pass of the batch are those of the step.
    """

    def __init__(self, early: bool) -> None:
        self.early = early
        self.images: Tensor | None = None  # the batch as the step gets it; the engine compares it with what it passes
        self.sent: Tensor | None = None  # logits that have left before the step has ended
        self._logits: Future[Tensor] = Future()
        self._settled = threading.Lock()  # is taken by the end of the step or, if that comes first, by an interrupt
        self._interrupted = False

    def awaits(self, images: Tensor) -> bool:
        """Return whether the caller waits for the first pass of these images."""
        return self.early and self.sent is None and images is self.images

    def require(self, logits: Tensor) -> None:
        """Refuse a step that ends with other logits than those that have left."""
        if self.sent is not None and not torch.equal(logits, self.sent):
            raise ConformanceError(
                "The logits of the step are not those of its first pass: set info.replies_first to False."
            )

    def send(self, logits: Tensor) -> None:
        """Give the caller a copy of the logits, which it may change while the step goes on."""
        if self._interrupted:
            raise Abandoned
        self.sent = logits
        self._logits.set_result(logits.clone())

    def end(self, logits: Tensor) -> None:
        """End the step, which then stays made, and give the caller its logits if it does not have them yet."""
        if not self._settled.acquire(blocking=False):
            raise Abandoned
        if self.sent is None:
            self.sent = logits
            self._logits.set_result(logits)

    def fail(self, error: BaseException) -> bool:
        """Raise an error in the caller, and return whether this was possible. It is not after the reply."""
        if self.sent is None:
            self._logits.set_exception(error)
        return self.sent is None

    def wait(self) -> Tensor:
        """Return the logits when they leave."""
        return self._logits.result()

    def abandon(self) -> None:
        """Let the step be undone, unless it has ended."""
        self._interrupted = True
        self._settled.acquire(blocking=False)


class Budget:
    """The rule that decides which batches are learned from.

    Args:
        budget: None for all of them. A number up to 1 is a share of the batches. "realtime" leaves out a batch that had to
            wait for the step before it; "20ms" leaves it out if it waited for longer than 20 milliseconds.
    """

    def __init__(self, budget: str | float | None) -> None:
        self.budget = budget
        self.share, self.patience = 1.0, float("inf")
        if isinstance(budget, str):
            self.patience = _milliseconds(budget) / 1000
        elif budget is not None:
            require_between(0, 1, budget=budget)
            self.share = float(budget)
        self._credit = 1 - self.share  # so that the first batch is learned from
        self.skipped = 0

    def refusal(self, waited: float) -> str | None:
        """Return None if a batch is to be learned from, and otherwise the reason. `waited` is in seconds."""
        self._credit += self.share
        due = self.share > 0 and self._credit > 1 - 1e-9
        reason = LATE if waited > self.patience else None if due else NOT_DUE
        if due:
            self._credit -= 1
        self.skipped += reason is not None
        return reason


def _milliseconds(budget: str) -> float:
    """Return the time that a call may wait for the step before it and still learn."""
    if budget == "realtime":
        return 0.0
    try:
        found = float(budget.removesuffix("ms")) if budget.endswith("ms") else float("nan")
    except ValueError:
        found = float("nan")
    if not 0 <= found < float("inf"):
        raise ConfigError(f'budget={budget!r}: give "realtime", milliseconds such as "20ms", or a share from 0 to 1.')
    return found


class Behind:
    """The thread of an adapter in which its steps are made, and the error of a step whose reply has left already."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._busy = False
        self._ident: int | None = None  # of the thread
        self._process = os.getpid()
        self._thread: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple[type[Behind], tuple[()]]:
        return Behind, ()  # a copy has a thread of its own

    def call(self, step: Callable[[Reply], Tensor], lock: threading.RLock, early: bool) -> Tensor:
        """Make a step in the thread, and return its logits as soon as they are known.

        Args:
            step: The step. It uses the reply, and returns its logits.
            lock: The lock of the adapter, which the thread holds until the step has ended.
            early: Whether the logits of the first pass of the batch are those of the step.
        """
        reply = Reply(early)
        threads = torch.get_num_threads()

        def make() -> None:
            compute_on(threads)  # which decides how a batch is divided
            self._ident = threading.get_ident()
            with lock:
                self._busy = True
                try:
                    step(reply)
                except Abandoned:
                    pass
                except BaseException as error:
                    if not reply.fail(error):
                        self.error = error
                finally:
                    self._busy = False

        if self._thread is None or self._process != os.getpid():  # no thread survives a fork
            self._process = os.getpid()
            self._thread = ThreadPoolExecutor(1, "acclimate-behind")
        try:
            self._thread.submit(copy_context().run, make)
            return reply.wait()
        except BaseException:
            reply.abandon()
            raise

    def is_this_thread(self) -> bool:
        """Return whether the calling thread is that of the steps: a hook of the model may call the adapter."""
        return self._ident == threading.get_ident()

    def wait(self, lock: threading.RLock) -> float:
        """Wait for the step that is under way, and return for how many seconds. A hook inside of the step does not wait."""
        if not self._busy or threading.current_thread().name.startswith(WORKERS):
            return 0.0
        start = time.perf_counter()
        with lock:
            return time.perf_counter() - start

    def raise_error(self) -> None:
        """Raise the error of the last step, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread. A further call starts another."""
        thread, self._thread = self._thread, None
        if thread is not None and self._process == os.getpid():
            thread.shutdown(wait=not self.is_this_thread())
