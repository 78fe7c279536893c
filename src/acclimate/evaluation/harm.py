"""The harm that adaptation does on hostile streams, without and with the guard."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from ..core.registry import find_method
from ..data.hostile import JUNK, hostile_streams
from ..data.streams import Stream
from ..errors import InputError
from .grid import Execution, run_grid
from .paired import Counts, Difference, paired_difference, unpack_counts
from .run import Result
from .spec import Protocol
from .store import Store
from .tables import SOURCE
from .testbed import Testbed

RATES = ("own", "tuned", "10x", "100x")
FACTORS = {"10x": 10.0, "100x": 100.0}
LENGTHS = ("lr", "lr_generator", "lr_predictor")  # options that the length of a step is proportional to
OTHER_LENGTHS = ("rho",)  # of methods that have no learning rate
WINDOW: dict[str, Any] = {"window": 16}  # lets a method that compares samples collect single images
METHODS = ("tent", "eta", "sar", "dct", "deyo", "roid", "keel")
CORRUPTIONS = ("clean", "fog", "frost")
IMAGES = 512
TOLERATED = 1.0  # points below the unadapted model


@dataclass(frozen=True)
class HarmCell:
    """One method at one rate of learning on one stream. Differences are from the unadapted model, in points."""

    method: str
    rate: str
    stream: str
    source: float  # accuracy of the unadapted model, in per cent
    unguarded: Difference
    guarded: Difference
    late: Difference  # with the guard, in the second half of the images that show something
    estimated: float | None  # difference that the guard estimates without labels
    alarms: int


def measure_harm(
    testbed: Testbed,
    methods: Iterable[str],
    *,
    rates: Sequence[str] = RATES,
    batch_size: int = 64,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    store: Store | None = None,
    fresh: bool = False,
    console: Console | None = None,
) -> list[HarmCell]:
    """Run methods on hostile streams of the data, without and with the guard, and compare them with the unadapted model.

    Args:
        testbed: The source model with its data.
        methods: The names of the methods.
        rates: The rates of learning: "own" for the defaults of a method, "tuned" for the options that were tuned for the
            model, if there are some, and multiples of the method's own learning rate.
        batch_size: The number of images in a batch, where it is not 1.
        execution: The device and the processes on which runs are made.
        store: The store in which runs are kept.
        fresh: Whether to repeat runs that are in the store.
        console: The console for progress.
    """
    streams = list(hostile_streams(testbed.data.domains, batch_size=batch_size))
    cells = []
    for size in dict.fromkeys(stream.batch_size for stream in streams):
        mine = [stream for stream in streams if stream.batch_size == size]
        chosen = [
            (name, rate, options)
            for name in methods
            if (needed := _needed(testbed, name, mine[0])) is not None
            for rate, options in _rates(testbed, name, rates, size, needed).items()
        ]
        pairs = [(SOURCE, {}), *((name, options) for name, _, options in chosen)]
        results: list[list[Result]] = []
        for guard in (False, True):
            outcomes = run_grid(
                testbed,
                mine,
                pairs,
                protocol=replace(Protocol(), guard=guard),
                execution=execution,
                store=store,
                fresh=fresh,
                console=console,
            )
            results.append([outcome.result for outcome in outcomes])
        for i, stream in enumerate(mine):
            plain, guarded = (each[i * len(pairs) : (i + 1) * len(pairs)] for each in results)
            source = plain[0]
            for (name, rate, _), one, other in zip(chosen, plain[1:], guarded[1:]):
                cells.append(
                    HarmCell(
                        name,
                        rate,
                        stream.setting,
                        100 * _accuracy(source),
                        _difference(one, source),
                        _difference(other, source),
                        _difference(other, source, late=True),
                        None if other.estimated_harm is None else -100 * other.estimated_harm,
                        len(other.events),
                    )
                )
    return cells


def _needed(testbed: Testbed, method: str, stream: Stream) -> dict[str, Any] | None:
    """Return the options without which a method refuses the batches of a stream, or None if it refuses them anyway."""
    images = next(iter(stream)).images.to(next(testbed.model.parameters()).device)
    for options in ({}, WINDOW) if WINDOW.keys() <= find_method(method).options().keys() else ({},):
        try:
            testbed.adapted(method, batch_size=stream.batch_size, **options)(images)
        except InputError:
            continue
        return options
    return None


def _rates(
    testbed: Testbed, method: str, rates: Sequence[str], batch_size: int, needed: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the options of a method for each rate of learning that it has. All contain those that are `needed`."""
    found: dict[str, dict[str, Any]] = {}
    for rate in rates:
        if rate == "own":
            found[rate] = {**needed}
        elif rate == "tuned":
            tuned = testbed.options(method, batch_size)
            found |= {rate: {**needed, **tuned}} if tuned else {}
        else:
            faster = _faster(testbed, method, FACTORS[rate], batch_size)
            found |= {rate: {**needed, **faster}} if faster else {}
    return found


def _faster(testbed: Testbed, method: str, factor: float, batch_size: int) -> dict[str, Any]:
    """Return options with which a method learns faster by a factor. There are none if it makes no steps."""
    options = find_method(method).options()
    names = [name for name in LENGTHS if name in options] or [name for name in OTHER_LENGTHS if name in options]
    unknown = [name for name in names if options[name].default is None]
    lengths = {name: options[name].default for name in names}
    if unknown:
        defaults: dict[str, Any] = dict.fromkeys(unknown)  # and not what was tuned
        optimizer = testbed.adapted(method, batch_size=batch_size, **defaults).method.optimizer(batch_size)
        assert optimizer is not None, "a method with a learning rate has an optimizer"
        lengths |= {name: optimizer.param_groups[names.index(name)]["lr"] for name in unknown}
    return {name: factor * value for name, value in lengths.items()}


def _counts(result: Result) -> list[Counts]:
    """Return the counts of the images that show something."""
    return [unpack_counts(text) for key, text in result.by_image.items() if key.name not in JUNK]


def _accuracy(result: Result) -> float:
    met, right = (sum(float(counts[:, i].sum()) for counts in _counts(result)) for i in (0, 1))
    return right / met


def _difference(mine: Result, source: Result, *, late: bool = False) -> Difference:
    halves = slice(1 if late else 0, None)
    return paired_difference([(one[halves], other[halves]) for one, other in zip(_counts(mine), _counts(source))])


@dataclass(frozen=True)
class HarmSummary:
    """The harm of a method at one rate of learning over all streams, in points. A loss is negative."""

    worst: float
    mean_harm: float  # mean over the streams of min(0, difference)
    losses: int  # streams with more than a tolerated loss, beyond chance
    gain: float  # mean over the streams of max(0, difference)

    @classmethod
    def of(cls, differences: Sequence[Difference]) -> HarmSummary:
        """Summarise differences from the unadapted model."""
        points = [difference.points for difference in differences]
        return cls(
            min(points),
            statistics.mean(min(0.0, p) for p in points),
            sum(d.points < -TOLERATED and d.points + (d.interval or 0) < 0 for d in differences),
            statistics.mean(max(0.0, p) for p in points),
        )


def summaries(cells: Sequence[HarmCell]) -> dict[tuple[str, str], tuple[HarmSummary, HarmSummary]]:
    """Return the summaries without and with the guard, by method and rate of learning."""
    groups: dict[tuple[str, str], list[HarmCell]] = {}
    for cell in cells:
        groups.setdefault((cell.method, cell.rate), []).append(cell)
    return {
        key: (HarmSummary.of([c.unguarded for c in group]), HarmSummary.of([c.guarded for c in group]))
        for key, group in groups.items()
    }
