"""What each part of DCT is worth: accuracy with one thing changed at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ..core.registry import create_method
from ..methods._leading import leading_blocks
from ..models.families import view_of
from ..papers.dct.reported import reported
from .figures import HUES, INK, Figure, drawing, new, spoken
from .intervals import enough, verdict
from .registry import CORRUPTIONS, FIVE, SEED, SEVERITY, FigureKind
from .subject import BATCH, Subject
from .variants import HOW_RUN, Scored, protocol_of, recoveries, rows_of, run_variants, worded_options

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(subject: Subject, *, corruptions: Sequence[str] = FIVE, severity: int | None = None, seed: int = 0) -> list[Figure]:
    """Draw how accuracy changes when one part of DCT is changed."""
    severity = subject.severity(severity)
    groups = parts(subject)
    variants = {name: variant for group in groups.values() for name, variant in group.items()}
    scored = run_variants(subject, corruptions, variants, severity=severity, seed=seed)
    same = [name for name, variant in variants.items() if variant == variants["DCT"] and name != "DCT"]
    with drawing():
        canvas = new(7.2, 5.4)
        _draw_parts(canvas.subplots(), groups, scored, same, corruptions)
    paper = reported("ablation").averages
    base = variants["DCT"][1]
    figure = Figure(
        name="ablation",
        title="What each part of DCT is worth",
        caption=f"Top-1 accuracy as difference from DCT on the same images: a dot for each corruption, a diamond for their "
        f"mean with its 95 % interval over images, and at the right the mean itself. Below, each row changes one thing of "
        f"DCT as it is used here ({worded_options(base)}); hollow diamonds are DCT itself. Free vectors are keys and values "
        f"that are learned themselves, the same for every image, with the generators' learning rate. A conditioner left out "
        f"is a key or value of zero. Without the ascent (rho 0) the gradient is taken where the model stands; without the "
        f"filter (margin ln C) every image is learned from, and the recovery by the moving average of the loss works as "
        f"before. No option was tuned again for a row. {HOW_RUN} One seed: what another order of the images would give was "
        f"not measured. The paper's table (ViT-B/16, ImageNet-C, severity 5, all 15 corruptions) has three of these rows: "
        f"SAR {paper['sar']:g} %, conditioners without generator {paper['dct(generator=False)']:g} %, DCT "
        f"{paper['dct']:g} %. The other rows have no counterpart in it.",
        rows=[
            {**row, "difference": row["accuracy"] - whole}
            for row, whole in zip(rows_of(variants, scored), cycle(scored["DCT"].accuracies))
        ],
        canvas=canvas,
        findings=findings(scored, same),
        protocol=protocol_of(
            scored["DCT"], options=worded_options(base), sar=worded_options(variants["SAR: no conditioners"][1])
        ),
        origin=subject.origin,
    )
    return [figure]


def parts(subject: Subject) -> dict[str, dict[str, tuple[str, Mapping[str, Any]]]]:
    """Return the variants by what they are about. What equals DCT as it is here has its options, and so is its run."""
    view, tuned = view_of(subject.model), subject.testbed.options
    depth, base = len(view.blocks), tuned("dct", BATCH)
    usual = create_method("dct", base).config

    def changed(**options: Any) -> tuple[str, Mapping[str, Any]]:
        return "dct", base if all(usual[name] == value for name, value in options.items()) else {**base, **options}

    def first(count: int) -> tuple[str, Mapping[str, Any]]:
        as_it_is = usual["blocks"] is None and count == len(leading_blocks(depth))
        return changed(blocks=None if as_it_is else count)

    counts = sorted({max(1, round(depth * quarter / 4)) for quarter in (1, 2, 3, 4)})
    return {
        "whole": {
            "Source": ("source", tuned("source", BATCH)),
            "SAR: no conditioners": ("sar", tuned("sar", BATCH)),
            "DCT": ("dct", base),
        },
        "generator": {"free vectors, no generator": changed(generator=False)},
        "conditioners": {
            "keys alone": changed(conditioners="k"),
            "values alone": changed(conditioners="v"),
            "keys and values": changed(conditioners="kv"),
            "queries, keys and values": changed(conditioners="qkv"),
        },
        "start": {"random start": changed(init="default"), "start at zero": changed(init="zero")},
        "blocks": {f"first {count} of {depth} blocks": first(count) for count in counts},
        "step": {
            "no sharpness-aware ascent": changed(rho=0.0),
            # no prediction's entropy is above ln C
            "no filter of samples": changed(margin=math.log(view.classes)),
        },
    }


def findings(scored: Mapping[str, Scored], same: Sequence[str]) -> list[str]:
    """Return what the parts are worth, in sentences."""
    paper = reported("ablation").averages
    said = paper["dct(generator=False)"] - paper["sar"], paper["dct"] - paper["sar"]
    whole, sar, free = (scored[name] for name in ("DCT", "SAR: no conditioners", "free vectors, no generator"))
    gains = {name: each.over(whole) for name, each in scored.items() if name not in (*same, "DCT", "Source")}
    worst, best = min(gains, key=lambda name: gains[name].mean), max(gains, key=lambda name: gains[name].mean)
    alike = all(
        a.result.predictions == b.result.predictions
        for a, b in zip(scored["keys and values"].outcomes, scored["queries, keys and values"].outcomes)
    )
    if enough(gains[best], whole.adaptation):
        certain = [name for name, gain in gains.items() if gain.excludes_zero]
        different = f"Certainly different from DCT: {', '.join(certain) or 'no row'}."
    else:
        different = "There are too few images or steps to say which rows differ from DCT."
    return [
        f"Source {scored['Source'].mean:.1f} %, SAR {sar.mean:.1f} %, DCT {whole.mean:.1f} %. Over SAR, free vectors gain "
        f"{free.over(sar).text('points', 1)} and DCT {whole.over(sar).text('points', 1)}; in the paper {said[0]:+.1f} and "
        f"{said[1]:+.1f}. That DCT gains over SAR {verdict(whole.over(sar), whole.adaptation)}.",
        f"Of the changed rows, {worst!r} has the lowest mean, {gains[worst].text('points', 1)} from DCT, and {best!r} the "
        f"highest, {gains[best].text('points', 1)}. {different}",
        f"With and without the query conditioner the scores of all images {'are the same' if alike else 'differ'}.",
        f"Without the filter the model recovered {recoveries(scored['no filter of samples'].outcomes)} times, with it "
        f"{recoveries(whole.outcomes)} times, over {len(whole.outcomes)} runs.",
    ]


def _draw_parts(
    axes: Axes,
    groups: Mapping[str, Mapping[str, Any]],
    scored: Mapping[str, Scored],
    same: Sequence[str],
    corruptions: Sequence[str],
) -> None:
    whole = scored["DCT"]
    y = 0.0
    places: dict[str, float] = {}
    for group in groups.values():
        for name in group:
            places[name] = y
            y += 1
        y += 0.5  # between what rows are about
    for name, at in places.items():
        differences = [value - reference for value, reference in zip(scored[name].accuracies, whole.accuracies)]
        for i, difference in enumerate(differences):
            label = spoken(corruptions[i]) if name == "Source" else None
            beside = at + 0.6 * ((i + 0.5) / len(differences) - 0.5)  # so that equal ones do not hide each other
            axes.plot(difference, beside, "o", ms=3, color=HUES[i % len(HUES)], label=label, zorder=3)
        hollow = name in (*same, "DCT")
        gain = scored[name].over(whole)
        if not hollow and math.isfinite(gain.low):
            axes.plot([gain.low, gain.high], [at, at], lw=1.2, color=INK, solid_capstyle="butt", zorder=2)
        axes.plot(
            gain.mean, at, "D", ms=6, mec=INK, mfc="none" if hollow else INK,
            label="mean" if name == "Source" else None,
        )  # fmt: skip
        axes.annotate(
            f"{scored[name].mean:.1f}", (1, at), xycoords=("axes fraction", "data"), xytext=(24, 0),
            textcoords="offset points", va="center", ha="right",
        )  # fmt: skip
    axes.axvline(0, color=INK, lw=0.8, ls="--")
    axes.set_yticks(list(places.values()), list(places))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("difference from DCT (points of top-1 accuracy)")
    axes.set_title("What each part of DCT is worth")
    axes.annotate("mean %", (1, 1), xycoords="axes fraction", xytext=(24, 4), textcoords="offset points", ha="right")
    axes.figure.legend(loc="outside lower center", ncols=len(corruptions) + 1 if len(corruptions) < 6 else 5, fontsize=8)


FIGURE = FigureKind(
    name="ablation",
    help="what each part of DCT is worth",
    position=50,
    draw=draw,
    draws=("ablation",),
    arguments=(CORRUPTIONS, SEVERITY, SEED),
    labels=True,
)
