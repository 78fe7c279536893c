"""Many runs: every method on every stream, with a live view, and nothing run twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from torch import nn

from ..data.streams import Stream
from ..wrap import adapt
from .run import Result, run
from .scores import Scores
from .spec import Spec, describe, specify
from .store import Store


@dataclass(frozen=True)
class Outcome:
    """A run and its result."""

    spec: Spec
    result: Result
    found: bool  # in the store, from an earlier call


def sweep(
    model: nn.Module,
    streams: Sequence[Stream],
    methods: Mapping[str, Mapping[str, Any]],
    *,
    model_name: str,
    store: Store | None = None,
    again: bool = False,
    console: Console | None = None,
) -> list[Outcome]:
    """Run every method on every stream, each from the source model.

    Args:
        model: The source model. It is wrapped for every run and is itself again at the end.
        streams: What it meets.
        methods: Names of methods, each with its options.
        model_name: What to call the model in results.
        store: Where finished runs are found and kept; without one, nothing is.
        again: Run also what the store has.
        console: Where progress is shown, if it is a terminal.
    """
    described = describe(model, model_name)
    # a wrong option is an error now, not after the first hour
    todo = [
        (stream, specify(stream, method, dict(options), model=described))
        for stream in streams
        for method, options in methods.items()
    ]
    if store:
        store.prepare()
    outcomes = []
    console = console or Console(stderr=True)
    with Progress(*COLUMNS, console=console, disable=not console.is_terminal, transient=True) as progress:
        overall = progress.add_task("all runs", total=sum(stream.samples for stream, _ in todo))
        for stream, spec in todo:
            found = store.find(spec) if store and not again else None
            if found is not None:
                progress.advance(overall, stream.samples)
                outcomes.append(Outcome(spec, found, True))
                continue
            meter = _Meter(progress, overall, stream, spec)
            adapter = adapt(model, spec.method, seed=spec.seed, **methods[spec.method])
            try:
                result = run(adapter, stream, meter)
            finally:
                adapter.unwrap()
                meter.close()
            if store:
                store.write(spec, result)
            outcomes.append(Outcome(spec, result, False))
    return outcomes


COLUMNS = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


class _Meter:
    """Shows one run beside all of them."""

    def __init__(self, progress: Progress, overall: TaskID, stream: Stream, spec: Spec) -> None:
        self._progress, self._overall, self._seen = progress, overall, 0
        self._label = f"{spec.method} on {', '.join(spec.domains[:2])}{' ...' if len(spec.domains) > 2 else ''}"
        self._task = progress.add_task(self._label, total=stream.samples)

    def __call__(self, scores: Scores) -> None:
        self._progress.update(
            self._task, completed=scores.count, description=f"{self._label}  {scores.right / scores.count:6.1%}"
        )
        self._progress.advance(self._overall, scores.count - self._seen)
        self._seen = scores.count

    def close(self) -> None:
        self._progress.remove_task(self._task)
