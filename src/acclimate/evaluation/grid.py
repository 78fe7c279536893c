"""Many runs: every method on every stream, in one process or many, with a live view, and nothing run twice.

The grid is a list of runs that do not depend on each other. Wherever one is worked on, it claims its folder in the store,
goes on from the state that it finds there, and leaves its result; so a process that dies costs the time since its last
state, and whoever is given the run next does the rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from torch import nn

from ..core.method import Method
from ..core.registry import create, find
from ..core.statistics import SourceStatistics, fitting, require
from ..data.streams import Stream
from ..errors import AcclimateError, ConfigError, require_whole
from .jobs import GLANCE, Cargo, Job, Presents, begin, carry_on, one, pack
from .progress import View
from .run import Result
from .spec import Protocol, describe, specify
from .store import Outcome, Store

PATIENCE = 3  # deaths of workers in a row, with no run finished in between


def sweep(
    model: nn.Module,
    streams: Sequence[Stream],
    methods: Mapping[str, Mapping[str, Any]] | Sequence[tuple[str | type[Method], Mapping[str, Any]]],
    *,
    model_name: str,
    dataset: str = "custom",
    protocol: Protocol = Protocol(),  # noqa: B008 (frozen)
    source_statistics: SourceStatistics | Sequence[SourceStatistics] | None = None,
    store: Store | None = None,
    again: bool = False,
    shard: tuple[int, int] = (1, 1),
    jobs: int = 1,
    on: str | None = None,
    gpus: float | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Run every method on every stream, each from the source model.

    Args:
        model: The source model. It is wrapped for every run and is itself again at the end.
        streams: What it meets.
        methods: Methods by name or class, each with its options; as a list of pairs, a method may be there with several.
        model_name: What to call the model in results.
        dataset: What to call the data.
        protocol: What holds for all of them.
        source_statistics: Statistics of the source data, for methods that need them; of several, each method gets those that it needs.
        store: Where runs are kept, taken up and found again; without one, nothing is kept.
        again: Run also what the store has.
        shard: (i, n): do only the i-th of n parts of the grid, for a scheduler that starts this n times.
        jobs: Processes on this machine. Each computes with as many threads as this one would, so that the results are equal
            to the last bit; where that crowds the processor, give torch fewer.
        on: "ray": tasks on the Ray cluster that RAY_ADDRESS or an earlier `ray.init` names, else on one of this machine.
        gpus: Of each Ray task; by default 1 if the model is on a GPU.
        console: Where progress is shown: bars on a terminal, otherwise a line for each finished run.
    """
    require_whole(1, jobs=jobs)
    if on not in (None, "ray"):
        raise ConfigError(f'on={on!r}: "ray", or None for this machine.')
    described = describe(model, model_name)
    # a wrong option is an error now, not after the first hour
    chosen = [(find(method), options) for method, options in (methods.items() if isinstance(methods, Mapping) else methods)]
    sources = [source_statistics] if isinstance(source_statistics, SourceStatistics) else source_statistics or []
    made = [create(method, options) for method, options in chosen]
    given = [_source(sources, method, model, described) for method in made]
    grid = [
        Job(
            specify(
                seen, method, options, model=described, dataset=dataset, protocol=protocol, source_statistics=statistics
            ),
            seen,
            method,
            dict(options),
            statistics,
        )
        for stream in streams
        for (method, options), instance, statistics in zip(chosen, made, given)
        for seen in (stream.showing(instance.present) if isinstance(instance, Presents) else stream,)
    ]
    grid = _part(grid, shard)
    with ExitStack() as stack:
        store = store or Store(stack.enter_context(tempfile.TemporaryDirectory(prefix="acclimate-")))
        store.prepare()
        if again:
            for job in grid:
                store.forget(job.spec)
        found = {i: result for i, job in enumerate(grid) if (result := store.find(job.spec)) is not None}
        todo = [i for i in range(len(grid)) if i not in found]
        view = stack.enter_context(View(grid, found, store, console or Console(stderr=True)))
        if on is None and jobs == 1:
            results = _here(model, grid, todo, store, protocol, view)
        elif on is None:
            results = _in_processes(pack(model, grid, store, protocol), todo, view, jobs)
        else:
            from .on_ray import on_ray

            results = on_ray(pack(model, grid, store, protocol), todo, view, gpus)
        done = dict(found)
        for i, result in results:
            done[i] = result
            view.finished(i, result)
    return [Outcome(job.spec, done[i], i in found) for i, job in enumerate(grid)]


def _source(
    sources: Sequence[SourceStatistics], method: Method, model: nn.Module, described: Mapping[str, str]
) -> SourceStatistics | None:
    """What a method gets of the source statistics: nothing, if it needs nothing."""
    if not method.info.needs:
        return None
    return require(
        fitting(sources, method.info.needs), method.name or type(method).__name__, method.info.needs, model, described
    )


def _part(grid: list[Job], shard: tuple[int, int]) -> list[Job]:
    i, n = shard
    require_whole(1, shard=i, shards=n)
    if i > n:
        raise ConfigError(f"shard {i}/{n}: the first number is at most the second.")
    part = grid[i - 1 :: n]
    if not part:
        raise ConfigError(f"shard {i}/{n} is empty: there are {len(grid)} runs.")
    return part


def _here(
    model: nn.Module, grid: list[Job], todo: list[int], store: Store, protocol: Protocol, view: View
) -> Iterator[tuple[int, Result]]:
    for i in todo:
        with view.watching(i) as on_step:
            result = carry_on(model, grid[i], store, protocol, on_step)
        yield i, result


def _in_processes(cargo: Cargo, todo: list[int], view: View, jobs: int) -> Iterator[tuple[int, Result]]:
    """Spread over processes of this machine. One that is killed is replaced, and its run goes on from its last state."""
    left, deaths = set(todo), 0
    while left:
        # spawned, not forked: threads and GPUs do not survive a fork
        with ProcessPoolExecutor(min(jobs, len(left)), get_context("spawn"), begin, (cargo,)) as pool:
            futures = {pool.submit(one, i): i for i in sorted(left)}
            try:
                while futures:
                    ready, _ = wait(futures, GLANCE, FIRST_COMPLETED)
                    view.glance(futures.values())
                    for future in ready:
                        i = futures[future]
                        result = future.result()  # the error of a run ends the sweep; what was finished is kept
                        del futures[future]
                        left.discard(i)
                        deaths = 0
                        yield i, result
            except BrokenProcessPool:
                deaths += 1
                if deaths >= PATIENCE:
                    raise AcclimateError(
                        f"{deaths} worker processes in a row were killed before any run was finished, perhaps for want of "
                        "memory: give fewer jobs. The same command goes on from where they were."
                    ) from None
            finally:
                for future in futures:
                    future.cancel()
