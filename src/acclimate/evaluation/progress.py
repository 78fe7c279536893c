"""The progress of a grid: bars on a terminal, and otherwise a line for each finished run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

from ..core.adapter import Record
from .jobs import Job
from .journal import latest_record
from .run import Result
from .scores import Scores
from .store import Store

TEXT = TextColumn("{task.description}", markup=False)  # names may contain brackets
COLUMNS = (SpinnerColumn(), TEXT, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


class ProgressView:
    """A display of the progress of a grid and of all its current runs.

    Args:
        grid: All runs.
        found: Results that existed before, by the position of the run in the grid.
        store: The store, where runs in other processes write their records.
        console: The console. If it is not a terminal, every finished run is printed as a line of fields separated by tabs.
    """

    def __init__(self, grid: Sequence[Job], found: Mapping[int, Result], store: Store, console: Console) -> None:
        self._grid, self._store, self._console = grid, store, console
        self._progress = Progress(*COLUMNS, console=console, disable=not console.is_terminal, transient=True)
        self._overall = self._progress.add_task("all runs", total=sum(job.stream.samples for job in grid))
        self._tasks: dict[int, TaskID] = {}
        self._seen = {i: grid[i].stream.samples for i in found}
        self._finished = len(found)

    def __enter__(self) -> ProgressView:
        self._progress.start()
        self._progress.update(self._overall, completed=sum(self._seen.values()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    @contextmanager
    def watching(self, i: int) -> Iterator[Callable[[Scores, Record], None]]:
        """Let a run in this process inside the block show its progress. The value is its `on_step` function."""

        def on_step(scores: Scores, record: Record) -> None:
            self._show(i, scores.count, scores.right, record.entropy, record.drift, record.event)

        try:
            yield on_step
        finally:
            self._close(i)

    def poll(self, running: Iterable[int]) -> None:
        """Read the records of runs in other processes, and show their progress."""
        if not self._console.is_terminal:
            return
        for i in running:
            line = latest_record(self._store.folder(self._grid[i].spec))
            if line is not None:
                self._show(i, *(line[name] for name in ("images", "right", "entropy", "drift", "event")))

    def _show(self, i: int, images: int, right: int, entropy: float | None, drift: float | None, event: str | None) -> None:
        if i not in self._tasks:
            self._tasks[i] = self._progress.add_task("", total=self._grid[i].stream.samples)
        health = event or f"entropy {entropy or 0:.2f}, drift {drift or 0:.3f}"
        self._progress.update(
            self._tasks[i], completed=images, description=f"{_label(self._grid[i])}  {right / images:6.1%}  {health[:40]}"
        )
        self._seen[i] = images
        self._progress.update(self._overall, completed=sum(self._seen.values()))

    def _close(self, i: int) -> None:
        if i in self._tasks:
            self._progress.remove_task(self._tasks.pop(i))

    def finished(self, i: int, result: Result) -> None:
        """Show that a run is finished."""
        self._close(i)
        self._seen[i] = self._grid[i].stream.samples
        self._finished += 1
        self._progress.update(self._overall, completed=sum(self._seen.values()))
        if not (self._console.is_terminal or self._console.quiet):
            spec = self._grid[i].spec
            fields = [f"{self._finished}/{len(self._grid)}", spec.method, ",".join(map(str, spec.domains)), spec.setting]
            fields += [f"seed {spec.seed}", f"{100 * result.mean:.2f} %", f"{result.seconds:.1f} s", spec.id]
            print(*fields, sep="\t", file=self._console.file, flush=True)  # rich would replace tabs by spaces


def _label(job: Job) -> str:
    domains = job.spec.domains
    return f"{job.spec.method} on {', '.join(map(str, domains[:2]))}{' ...' if len(domains) > 2 else ''}"
