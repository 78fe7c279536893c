"""The service: a bounded queue of batches, and one thread that owns the adapter and serves streams in turn.

The thread replies as soon as the logits of a batch are known, and the next batch waits until the step has ended. Requests of
one stream that wait at the same time are joined to one batch, and may have to wait for further ones. Streams have turns, so
that a busy one delays the others by a batch at most. If more than half of the queue is full, batches are only predicted:
adaptation pauses, and prediction goes on.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.engine import entropy
from ..errors import InputError
from .metrics import Metrics
from .streams import Stream, Streams

UNNAMED = "default"  # the stream of requests without a name
IDLE = 0.2  # seconds after which the thread looks whether states are to be written
COMPARED = 1.0  # seconds between two images that the source model predicts too, for the page
RECENT = 12  # images on the page
TOLD = 60.0  # seconds between two lines of the log about states that cannot be written
NOT_FINITE = "The logits of these images are not finite. Are the images normalised?"
LOG = logging.getLogger("acclimate.serve")
T = TypeVar("T")


class Refused(Exception):
    """A request that cannot be served now: the status code, the reason, and the seconds after which to try again."""

    def __init__(self, code: int, reason: str, retry_after: int = 1) -> None:
        super().__init__(reason)
        self.code, self.retry_after = code, retry_after


@dataclass
class Job:
    """A batch of one request that waits for its logits."""

    stream: str
    images: Tensor
    start: bool = False  # of a sequence, which begins with the source model
    end: bool = False  # of a sequence, after which its state is removed
    queued: float = field(default_factory=time.monotonic)
    reply: Future[tuple[Tensor, dict[str, Any]]] = field(default_factory=Future)


@dataclass
class Recent:
    """An image that both models have predicted, for the page."""

    stream: str
    image: Tensor
    source: int
    adapted: int
    truth: int | None = None  # its class, if that is known


class Service:
    """The owner of an adapter and its streams.

    Args:
        streams: The streams of an adapter with reply="first".
        queue: Number of images that may wait.
        batch: Number of images in a batch of joined requests. A larger request is a batch of its own.
        delay: Seconds for which a request waits for others of its stream, unless they make up a batch before.
        timeout: Seconds after which a request that still waits is refused.
        learn_unnamed: Whether requests without a name share an adapted stream. Otherwise the source model predicts them.
        show: Whether some images are kept for the page, with the prediction of the source model.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        queue: int = 512,
        batch: int = 64,
        delay: float = 0.0,
        timeout: float = 30.0,
        learn_unnamed: bool = True,
        show: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        self.streams, self.adapter = streams, streams.adapter
        self.metrics = metrics or Metrics()
        self.recent: deque[Recent] = deque(maxlen=RECENT)
        self.show = show
        self._queue, self._batch, self._delay, self._timeout = queue, batch, delay, timeout
        self._learn_unnamed = learn_unnamed
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by stream, whose turn comes first
        self._controls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._images = 0
        self._compared = 0.0
        self._told = -TOLD
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="model-service", daemon=True)
        self._thread.start()

    # ---- called by any thread ---------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Let a batch wait for its turn.

        Raises:
            Refused: If the queue is full, or the service is closing.
            InputError: If the queue can never hold the batch.
        """
        count = len(job.images)
        if count > self._queue:
            raise InputError(f"The request has {count} images, and the queue of this server holds {self._queue}.")
        with self._changed:
            if self._closing:
                raise Refused(503, "The server is shutting down.", 5)
            if self._images + count > self._queue:
                raise Refused(429, f"{self._images} images are waiting already.")
            self._waiting.setdefault(job.stream, deque()).append(job)
            self._images += count
            self._changed.notify()

    def control(self, call: Callable[[], T]) -> Future[T]:
        """Run a function in the thread of the service, between two batches."""
        done: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise Refused(503, "The server is shutting down.", 5)
            self._controls.append((call, done))
            self._changed.notify()
        return done

    def close(self) -> None:
        """Refuse further requests, serve those that wait, and write all states."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and takes requests."""
        return self._thread.is_alive() and not self._closing

    @property
    def waiting(self) -> int:
        """The number of images that wait."""
        return self._images

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if not self._controls and not self._closing:
                        self._changed.wait(min([IDLE, *map(self._pause, self._waiting.values())]))
                    control = self._controls.popleft() if self._controls else None
                    jobs = [] if control else self._next()
                    busy = 2 * (self._images + sum(len(job.images) for job in jobs)) > self._queue
                    if self._closing and not jobs and not control:
                        break
                if control is not None:
                    self._answer(*control)
                try:
                    if jobs:
                        self._serve(jobs, busy)
                    self.streams.write_due()
                    self._measure()
                except Exception as error:  # for example a folder that somebody has removed: the requests go on
                    log("error", error=f"{type(error).__name__}: {error}")
        finally:
            self.adapter.close()
            for failed in self.streams.close():
                log("error", error=f"{type(failed).__name__}: {failed}")

    def _next(self) -> list[Job]:
        """Return the requests that make up the next batch, all of one stream."""
        name = next((name for name, queue in self._waiting.items() if self._closing or not self._pause(queue)), None)
        if name is None:
            return []
        queue = self._waiting.pop(name)
        jobs, count = [queue.popleft()], 0
        while queue and not queue[0].start and not jobs[-1].end:
            count = sum(len(job.images) for job in jobs) + len(queue[0].images)
            if count > self._batch or queue[0].images.shape[1:] != jobs[0].images.shape[1:]:
                break
            jobs.append(queue.popleft())
        if queue:
            self._waiting[name] = queue  # at the end: other streams come first
        self._images -= sum(len(job.images) for job in jobs)
        return jobs

    def _pause(self, queue: deque[Job]) -> float:
        """Return for how many seconds the requests of a stream still wait for others, which may join them."""
        if sum(len(job.images) for job in queue) >= self._batch:
            return 0.0
        return max(0.0, queue[0].queued + self._delay - time.monotonic())

    def _answer(self, call: Callable[[], Any], done: Future[Any]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    def _serve(self, jobs: list[Job], busy: bool) -> None:
        """Predict the requests of one stream as a batch, reply, and learn."""
        now = time.monotonic()
        jobs = [job for job in jobs if job.reply.set_running_or_notify_cancel()]  # from now on, nobody can cancel them
        for job in [job for job in jobs if now - job.queued > self._timeout]:
            jobs.remove(job)
            job.reply.set_exception(Refused(503, f"The request waited for more than {self._timeout:g} seconds."))
        if not jobs:
            return
        try:
            if jobs[0].start:  # no request that is joined to it starts the stream again
                if self.adapter.engine.unadapted(jobs[0].images).logits.isfinite().all():
                    self.streams.restart(jobs[0].stream)
                else:
                    jobs.pop(0).reply.set_exception(InputError(NOT_FINITE))  # and what the stream has learned is kept
                    if not jobs:
                        return
            adapts = self._learn_unnamed or jobs[0].stream != UNNAMED  # otherwise the request needs no state
            stream = self.streams.get(jobs[0].stream) if adapts else Stream(UNNAMED)
            images = torch.cat([job.images for job in jobs])
            reason = "unnamed" if not adapts else "frozen" if stream.frozen else "overload" if busy else None
            if reason is None:
                logits = self.adapter(images)
            elif reason == "unnamed":
                logits = self.adapter.engine.unadapted(images).logits
            else:
                with self.adapter.frozen():
                    logits = self.adapter(images)
            if reason is not None:
                self.metrics.skipped.labels(reason).inc()
        except BaseException as error:
            for job in jobs:
                job.reply.set_exception(error)
            return
        told = reason if logits.isfinite().all() else reason or "not finite"  # then the step leaves out the whole batch
        facts = {"learned": told is None} | ({} if told is None else {"reason": told})
        for job, part in zip(jobs, logits.split([len(job.images) for job in jobs])):
            if part.isfinite().all():
                job.reply.set_result((part, facts))
            else:
                job.reply.set_exception(InputError(NOT_FINITE))
        self._after(stream, images, logits, reason is None, 1000 * (time.monotonic() - now))
        if jobs[-1].end and not stream.frozen and jobs[-1].reply.exception() is None:
            self.streams.remove(stream.name)

    def _after(self, stream: Stream, images: Tensor, logits: Tensor, learned: bool, milliseconds: float) -> None:
        """Wait for the step behind the reply, and note what happened."""
        try:
            self.adapter.wait()
        except Exception as error:  # the state is that from before the step
            learned = False
            self.metrics.failures.inc()
            log("step failed", stream=stream.name, error=f"{type(error).__name__}: {error}")
        record = self.adapter.record if learned else None
        unsure = float(entropy(logits.float()).mean()) if record is None else math.nan
        stream.note(record, len(images), learned=learned, milliseconds=milliseconds, entropy=unsure)
        self.metrics.images.inc(len(images))
        if record is not None:
            self.metrics.steps.inc()
            self.metrics.learned.inc(record.used)
            if record.event is not None:
                self.metrics.events.labels(record.event.partition(":")[0]).inc()
                log("event", stream=stream.name, step=record.step, event=record.event)
        if self.show and time.monotonic() - self._compared > COMPARED:
            self._compared = time.monotonic()
            self._compare(stream, images[0], logits[0])

    def _compare(self, stream: Stream, image: Tensor, logits: Tensor) -> None:
        source = int(self.adapter.engine.unadapted(image[None]).logits.argmax())
        self.recent.append(Recent(stream.name, image, source, int(logits.argmax())))

    def _measure(self) -> None:
        metrics, known = self.metrics, list(self.streams.known.values())
        metrics.queue.set(self._images)
        metrics.streams.labels("memory").set(len(known))
        metrics.streams.labels("all").set(len(self.streams))
        metrics.write_failures.set(self.streams.failures)
        failure, self.streams.failure = self.streams.failure, None
        if failure is not None and time.monotonic() - self._told > TOLD:
            self._told = time.monotonic()
            log("states cannot be written", failures=self.streams.failures, error=f"{type(failure).__name__}: {failure}")
        harms = [stream.harm for stream in known if stream.harm is not None]
        accuracies = [stream.accuracy for stream in known if stream.accuracy is not None]
        metrics.harm.set(max(harms, default=math.nan))
        metrics.accuracy.set(min(accuracies, default=math.nan))


class JsonLines(logging.Formatter):
    """The form of the log: one JSON object in a line, also for what other packages log."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line."""
        if record.name == LOG.name:
            return record.getMessage()
        told = {"time": round(record.created, 3), "message": record.levelname.lower(), "from": record.name}
        error = {"error": record.exc_info[0].__name__} if record.exc_info and record.exc_info[0] else {}
        return json.dumps({**told, "told": super().format(record), **error})


def show_log() -> None:
    """Let the log of the server, and the warnings of all packages, reach the standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.captureWarnings(True)
    LOG.setLevel(logging.INFO)


def log(message: str, **about: Any) -> None:
    """Write one line of JSON to the log."""
    LOG.info(json.dumps({"time": round(time.time(), 3), "message": message, **about}))
