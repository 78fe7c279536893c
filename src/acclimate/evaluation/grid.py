"""A grid of runs: every method on every stream, in one process or in several, and no run twice.

The runs of a grid do not depend on each other. A process that works on a run locks the folder of the run in the store,
continues from the state that it finds there, and stores the result. If the process dies, only the time since its last state
is lost, and another process continues the run.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console

from ..core.console import PlainConsole
from ..core.method import Method
from ..core.processes import GRACE_SECONDS, MOST_PROCESSES, interrupts_held
from ..core.registry import find_method
from ..core.statistics import SourceStatistics, require_statistics
from ..data.catalog import Data
from ..data.disk import Files
from ..data.domains import Domain, Subset
from ..data.streams import Stream
from ..errors import AcclimateError, ConfigError, require_between, require_whole
from .jobs import POLL_SECONDS, Finished, Job, Payload, Presents, pack, run_in_worker, run_job, start_worker
from .progress import ProgressView
from .run import Result
from .spec import Protocol, describe, method_of, specify
from .store import Outcome, Store
from .testbed import Testbed

MAX_CRASHES = 3  # consecutive deaths of worker processes without a finished run


@dataclass(frozen=True)
class Execution:
    """The device and the processes on which runs are made. They do not change the results.

    Args:
        device: The device. Default: a GPU if there is one.
        threads: The threads of each process, on a CPU. Default: torch's. The number is part of the identity of a run,
            because it determines the order, and so the rounding, of sums.
        workers: The number of processes that load images in advance. Default: 0 for images in memory, otherwise up to 4.
        jobs: The number of processes on this machine. Each uses as many threads as a single process would, so that the
            results are equal bit for bit. Reduce `threads` if the processor is overloaded.
        on: "ray" for tasks on a Ray cluster: that of RAY_ADDRESS or of an earlier `ray.init`, or else a new one on this
            machine. None for this machine without Ray.
        gpus: The GPUs of each Ray task. Default: 1 if the model is on a GPU.
        shard: A pair (i, n), which selects the i-th of n parts of the grid, for a scheduler that starts n processes.
    """

    device: str | None = None
    threads: int | None = None
    workers: int | None = None
    jobs: int = 1
    on: str | None = None
    gpus: float | None = None
    shard: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        for name, least in (("jobs", 1), ("threads", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None:
                require_whole(least, **{name: value})
                require_between(least, MOST_PROCESSES, **{name: value})
        if self.on not in (None, "ray"):
            raise ConfigError(f'on={self.on!r}: "ray", or None for this machine.')

    def workers_for(self, data: Data) -> int:
        """Return the number of processes that load the images of a data set."""
        if self.workers is not None:
            return self.workers
        return min(4, os.cpu_count() or 1) if any(_on_disk(domain) for domain in data.domains) else 0


def _on_disk(domain: Domain) -> bool:
    return _on_disk(domain.domain) if isinstance(domain, Subset) else isinstance(domain, Files)


def run_grid(
    testbed: Testbed,
    streams: Sequence[Stream],
    methods: Mapping[str, Mapping[str, Any]] | Sequence[tuple[str | type[Method], Mapping[str, Any]]],
    *,
    protocol: Protocol = Protocol(),  # noqa: B008 (frozen)
    execution: Execution = Execution(),
    store: Store | None = None,
    fresh: bool = False,
    console: Console | None = None,
) -> list[Outcome]:
    """Run every method on every stream, each from the source model.

    Args:
        testbed: The source model with its data. The model is wrapped for every run, and unwrapped at the end.
        streams: The streams.
        methods: Methods by name or class, each with its options. In a list of pairs, a method may occur several times.
        protocol: The protocol of all runs.
        execution: The device and the processes on which runs are made.
        store: The store in which runs are kept, and from which they are continued or read. Without it nothing is stored.
        fresh: Whether to repeat runs that are in the store.
        console: The console for progress: bars on a terminal, and otherwise a line for each finished run.
    """
    grid = _part(_jobs(testbed, streams, methods, protocol), execution.shard)
    kept = store is not None
    with ExitStack() as stack:
        store = store or Store(stack.enter_context(tempfile.TemporaryDirectory(prefix="acclimate-")))
        store.prepare()
        if fresh:
            for job in grid:
                store.forget(job.spec)
        found = {i: result for i, job in enumerate(grid) if (result := store.find(job.spec)) is not None}
        todo = [i for i in range(len(grid)) if i not in found]
        view = stack.enter_context(ProgressView(grid, found, store, console or PlainConsole(stderr=True)))
        if execution.on is None and execution.jobs == 1:
            results = _run_here(testbed, grid, todo, store, protocol, view)
        elif execution.on is None:
            results = _run_in_processes(pack(testbed.model, grid, store, protocol), todo, view, execution.jobs)
        else:
            from .on_ray import run_on_ray

            results = run_on_ray(pack(testbed.model, grid, store, protocol), todo, view, execution.gpus)
        done = dict(found)
        for i, result in stack.enter_context(closing(results)):
            done[i] = result
            view.finished(i, result)
    return [Outcome(job.spec, done[i], i in found, store.folder(job.spec) if kept else None) for i, job in enumerate(grid)]


def _jobs(
    testbed: Testbed,
    streams: Sequence[Stream],
    methods: Mapping[str, Mapping[str, Any]] | Sequence[tuple[str | type[Method], Mapping[str, Any]]],
    protocol: Protocol,
) -> list[Job]:
    """Return the runs of the grid. A wrong option raises an error here, before any run begins."""
    described = describe(testbed.model, testbed.name)
    chosen = [
        (find_method(method), options) for method, options in (methods.items() if isinstance(methods, Mapping) else methods)
    ]
    made = [(method_of(method, options), dict(options)) for method, options in chosen]
    known = [_statistics(testbed, method, options, described) for method, options in made]
    jobs = []
    for stream in streams:
        for (method, options), statistics in zip(made, known):
            shown = stream.map_domains(method.present) if isinstance(method, Presents) else stream
            spec = specify(
                stream, type(method), options, model=described, dataset=testbed.data.name, protocol=protocol,
                source_statistics=statistics, shown=shown,
            )  # fmt: skip
            jobs.append(Job(spec, shown, type(method), options, statistics))
    return jobs


def _statistics(
    testbed: Testbed, method: Method, options: Mapping[str, Any], described: Mapping[str, str]
) -> SourceStatistics | None:
    """Return the source statistics that a method needs, or None if it needs none."""
    needs = method.info.needs
    if not needs:
        return None
    name = method.name or type(method).__name__
    return require_statistics(testbed.statistics_for(type(method), options), name, needs, testbed.model, described)


def _part(grid: list[Job], shard: tuple[int, int]) -> list[Job]:
    i, n = shard
    require_whole(1, shard=i, shards=n)
    if i > n:
        raise ConfigError(f"shard {i}/{n}: the first number is at most the second.")
    part = grid[i - 1 :: n]
    if not part:
        raise ConfigError(f"shard {i}/{n} is empty: there are {len(grid)} runs.")
    return part


def _run_here(
    testbed: Testbed, grid: list[Job], todo: list[int], store: Store, protocol: Protocol, view: ProgressView
) -> Finished:
    for i in todo:
        with view.watching(i) as on_step:
            result = run_job(testbed.model, grid[i], store, protocol, on_step)
        yield i, result


def _run_in_processes(payload: Payload, todo: list[int], view: ProgressView, jobs: int) -> Finished:
    """Distribute runs over processes of this machine.

    A process that is killed is replaced, and its run continues.
    """
    left, crashes = sorted(todo), 0
    while left:
        try:
            with closing(_run_in_pool(payload, left, view, jobs)) as results:
                for i, result in results:
                    left, crashes = [other for other in left if other != i], 0
                    yield i, result
        except BrokenProcessPool:
            crashes += 1
            if crashes >= MAX_CRASHES:
                raise AcclimateError(
                    f"{crashes} worker processes in a row were killed, or could not start, before any run was finished. "
                    "There may be too little memory: give fewer jobs. The same command continues from there."
                ) from None


def _run_in_pool(payload: Payload, todo: list[int], view: ProgressView, jobs: int) -> Finished:
    """Distribute runs over new processes, until a process is killed.

    If this function is left before the end, for whatever reason, the processes save the states of their runs and end.
    """
    context = get_context("spawn")  # threads and GPUs do not survive a fork
    theirs, ours = context.Pipe(duplex=False)
    futures: dict[Future[Result], int] = {}
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="acclimate-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "payload"
        file.write_bytes(pickle.dumps(payload))  # through a pipe, one process after another would have to wait for it
        pool = ProcessPoolExecutor(min(jobs, len(todo)), context, start_worker, (file, theirs))
        try:
            with interrupts_held():
                futures = {pool.submit(run_in_worker, i): i for i in todo}
                processes = list(pool._processes.values())
            while futures:
                ready, _ = wait(futures, POLL_SECONDS, FIRST_COMPLETED)
                view.poll(futures.values())
                for future in ready:
                    result = future.result()  # an error in a run ends the grid; finished runs are kept
                    yield futures.pop(future), result
        finally:
            ours.close()  # tells the processes to end; one that has finished its run leaves all others at once
            if futures:
                wait(futures, GRACE_SECONDS)
                for process in processes:
                    process.kill()  # its state is saved, or takes too long
            pool.shutdown(cancel_futures=True)  # once: a second call would not wait for the pool's thread
            theirs.close()
