"""What a step of each method costs, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from ..core.method import Method
from ..core.registry import find_method, list_methods
from ..errors import AcclimateError
from ..evaluation.cost import Cost, measure
from ..papers.dct.reported import reported
from .figures import HUES, INK, Figure, drawing, new
from .registry import SEED, SEVERITY, Argument, FigureKind
from .subject import BATCH, Subject
from .variants import worded_options

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOISE = "gaussian_noise"  # of which the paper gives running times
ROUNDS = 5


def draw(
    subject: Subject, *, corruption: str = NOISE, severity: int | None = None, seed: int = 0, rounds: int = ROUNDS
) -> list[Figure]:
    """Draw what a step of each registered method costs, in plain forward passes."""
    severity = subject.severity(severity)
    costs, refused = measure_all(subject, corruption, severity, seed=seed, rounds=rounds)
    minutes = {method: values[0] for method, values in reported("cost").rows.items()}
    unit = costs["tent"].ratio / minutes["tent"]
    scaled = {method: unit * value for method, value in minutes.items()}
    order = [*sorted(costs, key=lambda method: costs[method].ratio), *(m for m in refused if m in scaled)]
    batch = min(BATCH, subject.count)
    with drawing():
        canvas = new(7.2, 0.8 + 0.21 * len(order))
        left, right = canvas.subplots(1, 2, sharey=True, width_ratios=(2, 1))
        _draw_costs(left, right, order, costs, scaled)
    figure = Figure(
        name="cost",
        title="What a step of each method costs",
        caption=f"Left: time of one step on a batch of {batch} images, in plain forward passes of the same batch through "
        f"the same model, on a logarithmic axis. Each step was timed between two plain passes; shown are the median and "
        f"the range of up to {rounds} rounds after one that does not count. A step that takes long is timed once, and its "
        f"ratio is uncertain by more than is shown. The plain pass takes the batch whole, while the library "
        f"cuts it for its threads, so that Source need not cost exactly one. Diamonds: the running times that "
        f"the paper gives for 50 000 images on an RTX 3090 (TENT {minutes['tent']:g}, SAR {minutes['sar']:g}, DCT "
        f"{minutes['dct']:g} min, MEMO {minutes['memo'] / 60:g} h, DDA {minutes['dda'] / 1440:g} days), scaled so that TENT "
        f"coincides: only their ratios compare, and the paper does not state its model and batch size. Right: memory that "
        f"the first step needed beyond what the process held before it; copies of the model that a method makes when it is "
        f"wrapped are not in it, and on a CPU this is coarse. "
        f"Costs depend on how many images a method rejects, here of {corruption} of severity {severity}. "
        + ("Not run: " + " ".join(f"{method}: {why}" for method, why in refused.items()) if refused else "All were run."),
        rows=[
            _cost_row(method, costs.get(method), refused.get(method), minutes.get(method)) for method in (*costs, *refused)
        ],
        canvas=canvas,
        findings=findings(costs, minutes, refused),
        protocol=subject.protocol(
            corruption=f"{corruption}, severity {severity}, batches of {batch}",
            rounds=f"at most {rounds}",
            options="; ".join(f"{m}: {worded_options(o)}" for m, o in subject.testbed.tuned(BATCH).items())
            or "the defaults",
            seed=str(seed),
        ),
        origin=subject.origin,
    )
    return [figure]


def measure_all(
    subject: Subject, corruption: str, severity: int, *, seed: int = 0, rounds: int = ROUNDS
) -> tuple[dict[str, Cost], dict[str, str]]:
    """Return the cost of every method that can run here, and why the others cannot."""
    testbed = subject.testbed
    images = subject.batch(corruption, severity, count=BATCH * (rounds + 1))
    size = min(BATCH, len(images))
    batches = list(islice(cycle(part for part in images.split(size) if len(part) == size), rounds + 1))
    how = {} if testbed.preprocess is None else {"mean": testbed.preprocess.mean, "std": testbed.preprocess.std}
    costs: dict[str, Cost] = {}
    refused: dict[str, str] = {}
    methods = list_methods()
    for method in subject.track(methods, "cost of a step"):
        options = testbed.options(method, BATCH)
        try:
            known = testbed.statistics_for(method, options)
            costs[method] = measure(
                testbed.model, method, batches, options=options, source_statistics=known, seed=seed, **how
            )
        except AcclimateError as error:
            refused[method] = str(error)
    for method in reported("cost").rows:
        if method not in methods:
            refused[method] = "it is not a method of this library."
    return costs, refused


def findings(costs: Mapping[str, Cost], minutes: Mapping[str, float], refused: Mapping[str, str]) -> list[str]:
    """Return what steps cost, in sentences."""
    dearest = max(costs, key=lambda method: costs[method].ratio)
    over_sar, said = costs["dct"].ratio / costs["sar"].ratio, minutes["dct"] / minutes["sar"]
    idle = [m for m, found in costs.items() if not found.backward and find_method(m).optimizer is not Method.optimizer]
    shown = ", ".join(f"{method} {costs[method].ratio:.1f}" for method in ("source", "tent", "sar", "dct"))
    return [
        f"In plain forward passes: {shown}; {dearest} costs most, {costs[dearest].ratio:.0f}.",
        f"The median DCT step takes {over_sar:.2f} times as long as SAR's, in the paper {said:.2f} times; the rounds go "
        f"from {costs['sar'].least:.1f} to {costs['sar'].most:.1f} passes for SAR and from {costs['dct'].least:.1f} to "
        f"{costs['dct'].most:.1f} for DCT.",
        f"{len(costs)} methods were run"
        + (f", not {', '.join(refused)}" if refused else "")
        + (f"; {', '.join(idle)} rejected every image, and cost more where they learn." if idle else "."),
    ]


def _cost_row(method: str, cost: Cost | None, why: str | None, minutes: float | None) -> dict[str, Any]:
    fields = ("ratio", "least", "most", "rounds", "forward", "backward", "peak_mib")
    values = {name: None if cost is None else getattr(cost, name) for name in fields}
    return {"method": method, **values, "paper_minutes": minutes, "not_run": why or ""}


def _draw_costs(
    left: Axes, right: Axes, order: Sequence[str], costs: Mapping[str, Cost], scaled: Mapping[str, float]
) -> None:
    for at, method in enumerate(order):
        found = costs.get(method)
        if found is not None:
            left.plot([found.least, found.most], [at, at], lw=3, alpha=0.35, color=HUES[0], solid_capstyle="round")
            left.plot(found.ratio, at, "o", ms=5, color=HUES[0], label="measured" if at == 0 else None)
        if found is not None and found.peak_mib is not None:
            right.plot(found.peak_mib, at, "o", ms=5, color=HUES[0])
    marks = [(value, order.index(method)) for method, value in scaled.items() if method in order]
    left.plot(*zip(*marks), "D", ms=5, mfc="none", mec=HUES[1], ls="none", label="paper, scaled at TENT")
    left.axvline(1, color=INK, lw=0.8, ls="--")
    left.set_xscale("log")
    left.set_xlabel("time of a step (plain forward passes)")
    left.set_yticks(range(len(order)), order)
    left.invert_yaxis()
    left.set_title("Time")
    left.legend(loc="upper right", fontsize=8)
    right.set_xlim(left=0)
    right.set_xlabel("memory of the first step (MiB)")
    right.set_title("Memory")


FIGURE = FigureKind(
    name="cost",
    help="what a step of each method costs, side by side",
    position=60,
    draw=draw,
    draws=("cost",),
    arguments=(Argument("corruption", "the corruption of the images", NOISE), SEVERITY, SEED),
)
