"""Accuracy of DCT against the learning rate of its generators."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .figures import HUES, INK, Figure, drawing, new, spoken
from .intervals import enough
from .registry import CORRUPTIONS, FIVE, SEED, SEVERITY, FigureKind
from .subject import BATCH, Subject
from .variants import HOW_RUN, Scored, protocol_of, rows_of, run_variants, worded_options

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PAPERS_RATE = 0.01  # with which the paper's sensitivity is best; the numbers of that figure are not printed


def draw(subject: Subject, *, corruptions: Sequence[str] = FIVE, severity: int | None = None, seed: int = 0) -> list[Figure]:
    """Draw accuracy against the rate, and the difference from SAR, which has the same step without conditioners."""
    severity = subject.severity(severity)
    tuned = subject.testbed.options
    base = tuned("dct", BATCH)
    variants: dict[str, tuple[str, Mapping[str, Any]]] = {
        "Source": ("source", tuned("source", BATCH)),
        "SAR": ("sar", tuned("sar", BATCH)),
        **{f"DCT, {rate:g}": ("dct", {**base, "lr_generator": rate}) for rate in RATES},
    }
    scored = run_variants(subject, corruptions, variants, severity=severity, seed=seed)
    curve = {rate: scored[f"DCT, {rate:g}"] for rate in RATES}
    sar, source = scored["SAR"], scored["Source"]
    with drawing():
        canvas = new(7.2, 3.4)
        left, right = canvas.subplots(1, 2)
        _draw_rates(left, right, curve, sar, source, corruptions)
    rest = {name: value for name, value in base.items() if name != "lr_generator"}
    figure = Figure(
        name="sensitivity",
        title="Sensitivity to the learning rate of the generators",
        caption=f"Left: top-1 accuracy of DCT by the learning rate of its conditioner generators, a thin line for each "
        f"corruption and a thick one for their mean; horizontal lines are the means of SAR, which has the same step without "
        f"conditioners, and of the source model. Right: the same as difference from SAR on the same images; the band is the "
        f"95 % interval of the mean over images. All else is as tuned for this model, or the method's default "
        f"({worded_options(rest)}). {HOW_RUN} One seed and {sar.images} images in {math.ceil(sar.images / BATCH)} steps; a "
        f"rate that is best here was chosen with labels that a deployment does not have. The paper shows such a curve for "
        f"ViT-B/16 on ImageNet-C, best at {PAPERS_RATE:g} (dotted), without numbers.",
        rows=list(rows_of(variants, scored)),
        canvas=canvas,
        findings=findings(curve, sar, source),
        protocol=protocol_of(sar, rates=", ".join(f"{rate:g}" for rate in RATES), options=worded_options(rest)),
        origin=subject.origin,
    )
    return [figure]


def findings(curve: Mapping[float, Scored], sar: Scored, source: Scored) -> list[str]:
    """Return which rates are best and what that is worth, in sentences."""
    best = max(curve, key=lambda rate: curve[rate].mean)
    worst = min(curve, key=lambda rate: curve[rate].mean)
    still = min(curve)
    gains = {rate: curve[best].over(scored) for rate, scored in curve.items()}
    alike = [rate for rate in curve if not gains[rate].excludes_zero]
    learned, paper = gains[still], gains[PAPERS_RATE]
    said = [
        f"DCT is best at a rate of {best:g} with {curve[best].mean:.1f} %; SAR has {sar.mean:.1f} %, Source "
        f"{source.mean:.1f} %. DCT at that rate gains {curve[best].over(sar).text('points', 1)} over SAR. The worst rate, "
        f"{worst:g}, has {curve[worst].mean:.1f} %."
    ]
    if not enough(learned, curve[best].adaptation):
        return [*said, "There are too few images or steps to say which rates are better than others."]
    return [
        *said,
        f"The paired difference from the best may be 0 for {', '.join(f'{rate:g}' for rate in alike)}.",
        f"Over a rate of {still:g}, at which the generators hardly leave their start, learning them brings "
        f"{learned.text('points')}" + ("." if learned.excludes_zero else ": a gain is not seen."),
        f"From the paper's best rate, {PAPERS_RATE:g}, the best here differs by {paper.text('points')}"
        + ("." if paper.excludes_zero else ": a difference is not seen."),
    ]


def _draw_rates(
    left: Axes, right: Axes, curve: Mapping[float, Scored], sar: Scored, source: Scored, corruptions: Sequence[str]
) -> None:
    rates = list(curve)
    accuracy = [scored.accuracies for scored in curve.values()]
    above = [[value - reference for value, reference in zip(row, sar.accuracies)] for row in accuracy]
    for i, corruption in enumerate(corruptions):
        colour = HUES[i % len(HUES)]
        for axes, values in ((left, accuracy), (right, above)):
            style: Any = dict(lw=0.8, marker="o", ms=2, color=colour, label=spoken(corruption), zorder=3)  # above the mean
            axes.plot(rates, [row[i] for row in values], **style)
    for axes, values in ((left, accuracy), (right, above)):
        axes.plot(rates, [statistics.fmean(row) for row in values], lw=2.4, marker="o", ms=4, color=INK, label="mean")
        axes.axvline(PAPERS_RATE, color=INK, lw=0.8, ls=":", label="the paper's best rate")
        axes.set_xscale("log")
        axes.set_xlabel("learning rate of the generators")
    gains = [scored.over(sar) for scored in curve.values()]
    right.fill_between(rates, [g.low for g in gains], [g.high for g in gains], color=INK, alpha=0.12, linewidth=0)
    left.axhline(sar.mean, color=INK, lw=1, ls="--", label="SAR, mean")
    left.axhline(source.mean, color="#7F7F7F", lw=1.4, ls=":", label="Source, mean")
    right.axhline(0, color=INK, lw=1, ls="--")
    right.axhline(source.mean - sar.mean, color="#7F7F7F", lw=1.4, ls=":")
    left.set_ylabel("top-1 accuracy (%)")
    right.set_ylabel("DCT minus SAR (points)")
    left.set_title("Accuracy")
    right.set_title("Difference from SAR")
    left.figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)


FIGURE = FigureKind(
    name="sensitivity",
    help="accuracy against the learning rate of the generators",
    position=40,
    draw=draw,
    draws=("sensitivity",),
    arguments=(CORRUPTIONS, SEVERITY, SEED),
    labels=True,
)
