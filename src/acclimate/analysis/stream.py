"""Accuracy along one stream that passes through several shifts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..data.corruptions import CORRUPTIONS
from ..data.domains import Domain, DomainKey, Subset
from ..evaluation.bench import bench
from ..evaluation.grid import Execution
from ..evaluation.journal import steps_of
from .figures import HUES, Figure, drawing, new, spoken
from .registry import SEED, SEVERITY, Argument, FigureKind
from .subject import BATCH, Subject
from .variants import require_labels, right_in, worded_options

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = {"source": "#7F7F7F", "tent": HUES[4], "dct": HUES[0], "keel": HUES[1]}  # with their colours
EVERY_SECOND = CORRUPTIONS[::2]
AGAIN = "clean again"
WINDOW = 200  # images of the moving average
POINTS = 64  # of a line in each domain

Bands = list[npt.NDArray[np.bool_]]  # which images of each domain were predicted correctly, in the order of the stream


def draw(
    subject: Subject, *, corruptions: Sequence[str] = EVERY_SECOND, severity: int | None = None, seed: int = 0
) -> list[Figure]:
    """Draw the accuracy of several methods along clean images, one shift after another, and clean images again."""
    require_labels(subject)
    severity = subject.severity(severity)
    clean = subject.domain()
    domains = [clean, *(subject.domain(name, severity) for name in corruptions), _again(clean)]
    chosen = {method: subject.testbed.options(method, BATCH) for method in METHODS}
    with TemporaryDirectory() if subject.runs is None else nullcontext(str(subject.runs)) as folder:
        results = bench(
            subject.model,
            replace(subject.data, domains=domains),
            methods=chosen,
            settings="continual",
            seeds=[seed],
            batch_size=BATCH,
            source_statistics=subject.testbed.statistics,
            model_name=subject.testbed.name,
            execution=Execution(device=str(subject.device)),
            out=folder,
            console=subject.console,
        )
        ends = np.cumsum([len(domain.labels) for domain in domains])[:-1]
        bands: dict[str, Bands] = {}
        for outcome in results:
            assert outcome.folder is not None
            bands[outcome.spec.method] = np.split(right_in(steps_of(outcome.folder, outcome.spec.id)), ends)
    names = ["clean", *map(spoken, corruptions), AGAIN]
    with drawing():
        canvas = new(8.4, 3.6)
        _draw_lines(canvas.subplots(), names, bands)
    spec = results[0].spec
    told = "; ".join(f"{method}: {worded_options(options)}" for method, options in chosen.items())
    figure = Figure(
        name="stream",
        title="Accuracy along a stream of several shifts",
        caption=f"Top-1 accuracy along one stream: clean images, {len(corruptions)} corruptions of severity {severity} one "
        f"after another, and the clean images again, {subject.count} images of each. A method is not told when the shift "
        f"changes, and is never reset. The lines are moving averages over up to {WINDOW} images of the same domain, of "
        f"predictions made before the update by the batch that they are for. The legend has the means over the corruptions. "
        f"The options of the methods are those tuned for this model, or their defaults ({told}). One order.",
        rows=[
            {"method": method, "domain": name, "image": int(at) + 1, "accuracy": value}
            for method, right in bands.items()
            for name, band in zip(names, right)
            for at, value in zip(*smoothed(band))
        ],
        canvas=canvas,
        findings=findings(bands),
        protocol={**spec.shared, "domains": ", ".join(map(str, spec.domains)), "images": f"{subject.count} of each",
                  "seed": str(seed), "options": told},
        origin=subject.origin,
    )  # fmt: skip
    return [figure]


def smoothed(band: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the positions of some images of a domain, and the accuracy in per cent over the window around each."""
    where = np.unique(np.linspace(0, len(band) - 1, POINTS).round().astype(np.int64))
    total = np.cumsum([0, *band])
    low, high = np.maximum(where - WINDOW // 2, 0), np.minimum(where + WINDOW // 2, len(band))
    return where, 100 * (total[high] - total[low]) / (high - low)


def shift_means(bands: Mapping[str, Bands]) -> dict[str, float]:
    """Return the mean accuracy of each method over the shifts, in per cent."""
    return {method: 100 * float(np.mean([band.mean() for band in right[1:-1]])) for method, right in bands.items()}


def findings(bands: Mapping[str, Bands]) -> list[str]:
    """Return the accuracy over the shifts, and on clean images before and after them, in sentences."""
    means = ", ".join(f"{method} {mean:.1f} %" for method, mean in shift_means(bands).items())
    kept = ", ".join(
        f"{method} {100 * right[0].mean():.1f} and {100 * right[-1].mean():.1f} %" for method, right in bands.items()
    )
    return [f"Mean over the shifts: {means}.", f"Clean images, before and after the shifts: {kept}."]


def _again(clean: Domain) -> Domain:
    """Return the same images as a domain with another name, because the domains of a stream have different names."""
    domain = Subset(clean, np.arange(len(clean.labels)))
    domain.key = DomainKey(AGAIN)
    return domain


def _draw_lines(axes: Axes, names: Sequence[str], bands: Mapping[str, Bands]) -> None:
    sizes = [len(band) for band in next(iter(bands.values()))]
    starts = np.cumsum([0, *sizes])
    for number in range(1, len(names) - 1):
        axes.axvspan(starts[number], starts[number + 1], color="#DDDDDD" if number % 2 else "#ECECEC", lw=0, zorder=0)
    means = shift_means(bands)
    for method, right in bands.items():
        width, style = (2.6, "-") if method == "keel" else (1.6, "--" if method == "source" else "-")
        for number, band in enumerate(right):
            where, accuracy = smoothed(band)
            label = f"{method} {means[method]:.1f} %" if number == 0 else None
            axes.plot(starts[number] + where, accuracy, color=METHODS[method], lw=width, ls=style, label=label)
    axes.set_xlim(0, starts[-1])
    axes.set_xticks(starts[:-1] + np.array(sizes) / 2, [name.replace(" ", "\n") for name in names], fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("accuracy (%)")
    axes.set_title("One stream, one shift after another; no labels, no reset. Legend: mean over the shifts", loc="left")
    axes.figure.legend(loc="outside lower center", ncols=len(bands), fontsize=9)


FIGURE = FigureKind(
    name="stream",
    help="accuracy along a stream of several shifts",
    position=70,
    draw=draw,
    draws=("stream",),
    arguments=(Argument("corruptions", "which, separated by commas", EVERY_SECOND, list, "LIST"), SEVERITY, SEED),
    clean=True,
    labels=True,
)
