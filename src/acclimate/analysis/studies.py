"""Sensitivity, ablation and cost of DCT: grids of the bench, and their figures."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from ..core.method import Method
from ..core.registry import create, find, list_methods
from ..errors import AcclimateError, ConfigError
from ..evaluation.bench import bench
from ..evaluation.cost import Cost, measure
from ..evaluation.spec import Protocol
from ..evaluation.store import Outcome
from ..methods._leading import leading_blocks
from ..models.families import view
from ..papers.dct.reported import reported
from .figures import HUES, INK, Figure, drawing, new, spoken
from .scene import BATCH, Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STORE = "figures/runs"
RATES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PAPERS_RATE = 0.01  # with which the paper's sensitivity is best; the numbers of that figure are not printed
NOISE = "gaussian_noise"  # of which the paper gives running times
ROUNDS = 5
Variants = Mapping[str, tuple[str, Mapping[str, Any]]]  # what it is called, method, options
Outcomes = dict[str, list[Outcome]]  # by that name, one for each corruption

BLIND = (
    "Nothing watches for collapse (the guard is off, as in the paper's code), and each run starts from the source model. "
    "Accuracy is that of predictions made before the update by the batch that they are for."
)


# ---- the grid -----------------------------------------------------------------------------------------------------


def run_all(
    scene: Scene,
    corruptions: Sequence[str],
    variants: Variants,
    *,
    severity: int | None,
    seed: int,
    store: str | os.PathLike[str],
    console: Console | None,
) -> Outcomes:
    """Every variant on every corruption, each from the source model. Variants that are the same run are run once."""
    require_labels(scene)
    methods: list[tuple[str, Mapping[str, Any]]] = []
    position = {}
    for name, (method, options) in variants.items():
        if (method, options) not in methods:
            methods.append((method, options))
        position[name] = methods.index((method, options))
    results = bench(
        scene.source,
        [scene.domain(name, severity) for name in corruptions],
        methods=methods,
        seeds=[seed],
        batch_size=BATCH,
        protocol=Protocol(guard=False),
        source_statistics=scene.statistics,
        model_name=scene.name,
        device=str(next(scene.source.parameters()).device),
        workers=0,  # the pictures are in memory
        store=store,
        console=console,
    )
    return {name: list(results[at :: len(methods)]) for name, at in position.items()}  # by domain, then by method


def require_labels(scene: Scene) -> None:
    """Refuse pictures of which it is not known what the model should say."""
    head = view(scene.source).classes
    if scene.labelled and len(scene.classes) == head:
        return
    found = f"are in {len(scene.classes)} folders" if scene.labelled else "have no classes"
    raise ConfigError(
        f"Accuracy cannot be measured: the pictures {found}, and the model has {head} classes. Give a folder with one "
        f"sub-folder for each of the {head}, which sorted by name are in the order of the model's classes; or measure on a "
        "data set with `acclimate bench --data NAME --root DIR`."
    )


def tuned(scene: Scene, method: str) -> dict[str, Any]:
    return dict(scene.options.get(method, {}))


def top1(outcomes: Sequence[Outcome]) -> list[float]:
    """In per cent, for each corruption."""
    return [100 * outcome.result.mean for outcome in outcomes]


def mean(outcomes: Sequence[Outcome]) -> float:
    return statistics.fmean(top1(outcomes))


def uncertainty(outcomes: Sequence[Outcome]) -> float:
    """Standard error of the mean accuracy, in points, if the corruptions of a picture were right or wrong together."""
    share = mean(outcomes) / 100
    return 100 * math.sqrt(share * (1 - share) / outcomes[0].result.samples)


def protocol_of(outcomes: Sequence[Outcome], **more: str) -> dict[str, str]:
    spec = outcomes[0].spec
    shared = {name: value for name, value in spec.shared.items() if name != "data"}
    where = ", ".join(title for outcome in outcomes for title in outcome.spec.domains)
    return {**shared, "corruptions": where, "images": str(outcomes[0].result.samples), "seed": str(spec.seed), **more}


def worded(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "the defaults"


def rows_of(variants: Variants, outcomes: Outcomes) -> Iterator[dict[str, Any]]:
    """The numbers behind a figure, one row for each variant and corruption."""
    for name, (method, options) in variants.items():
        for outcome in outcomes[name]:
            result = outcome.result
            yield {
                "variant": name,
                "method": method,
                "options": worded(options),
                "domain": outcome.spec.domains[0],
                "accuracy": 100 * result.mean,
                "learned_from": 100 * result.used / result.samples,
                "recoveries": recoveries([outcome]),
                "run": outcome.spec.id,
            }


def recoveries(outcomes: Sequence[Outcome]) -> int:
    return sum(event == "recovered" for outcome in outcomes for _, event in outcome.result.events)


# ---- sensitivity --------------------------------------------------------------------------------------------------


def sensitivity(
    scene: Scene,
    corruptions: Sequence[str],
    *,
    severity: int | None = None,
    seed: int = 0,
    console: Console | None = None,
    store: str | os.PathLike[str] = STORE,
) -> Figure:
    """Accuracy of DCT against the learning rate of its generators."""
    base = tuned(scene, "dct")
    variants: dict[str, tuple[str, Mapping[str, Any]]] = {
        "Source": ("source", tuned(scene, "source")),
        "SAR": ("sar", tuned(scene, "sar")),
        **{f"DCT, {rate:g}": ("dct", {**base, "lr_generator": rate}) for rate in RATES},
    }
    outcomes = run_all(scene, corruptions, variants, severity=severity, seed=seed, store=store, console=console)
    curve = {rate: outcomes[f"DCT, {rate:g}"] for rate in RATES}
    with drawing():
        canvas = new(7.2, 3.4)
        left, right = canvas.subplots(1, 2)
        _draw_rates(left, right, curve, outcomes["SAR"], outcomes["Source"], corruptions)
    rest = {name: value for name, value in base.items() if name != "lr_generator"}
    return Figure(
        name="sensitivity",
        title="Sensitivity to the learning rate of the generators",
        caption=f"Left: top-1 accuracy of DCT by the learning rate of its conditioner generators, a thin line for each "
        f"corruption and a thick one for their mean; horizontal lines are the means of SAR, which has the same step without "
        f"conditioners, and of the source model. Right: the same as difference from SAR on the same pictures. All else is "
        f"as tuned for this model, or the method's default ({worded(rest)}). {BLIND} One seed and "
        f"{outcomes['SAR'][0].result.samples} pictures in {math.ceil(outcomes['SAR'][0].result.samples / BATCH)} steps: "
        f"small differences are chance, and a rate that is best here was chosen with labels that a deployment does not "
        f"have. The paper shows such a curve for ViT-B/16 on ImageNet-C, best at {PAPERS_RATE:g} (dotted), without numbers.",
        rows=list(rows_of(variants, outcomes)),
        canvas=canvas,
        findings=rate_findings(curve, outcomes["SAR"], outcomes["Source"]),
        protocol=protocol_of(outcomes["SAR"], rates=", ".join(f"{rate:g}" for rate in RATES), options=worded(rest)),
    )


def _shared_first(means: Mapping[float, float]) -> str:
    """What to say of a rate with the best mean."""
    others = sum(value == max(means.values()) for value in means.values()) - 1
    return f"has the best mean here, and so have {others} others." if others else "is the best here too."


def rate_findings(curve: Mapping[float, Sequence[Outcome]], sar: Sequence[Outcome], source: Sequence[Outcome]) -> list[str]:
    means = {rate: mean(outcomes) for rate, outcomes in curve.items()}
    best = max(means, key=lambda rate: means[rate])
    error = uncertainty(curve[best])
    near = [rate for rate in means if means[best] - means[rate] <= error]
    worst = min(means, key=lambda rate: means[rate])
    paper = means[best] - means[PAPERS_RATE]
    still = min(means)
    return [
        f"DCT is best at a rate of {best:g} with {means[best]:.1f} %; SAR has {mean(sar):.1f} %, Source "
        f"{mean(source):.1f} %.",
        f"Rates from {min(near):g} to {max(near):g} are within the standard error of that ({error:.1f} points); "
        f"the worst, {worst:g}, has {means[worst]:.1f} %.",
        f"Over a rate of {still:g}, at which the generators hardly leave their start, learning them brings at most "
        f"{means[best] - means[still]:.2f} points.",
        f"The paper's best rate, {PAPERS_RATE:g}, "
        + (f"is {paper:.2f} points below the best here." if paper else _shared_first(means)),
    ]


def _draw_rates(
    left: Axes,
    right: Axes,
    curve: Mapping[float, Sequence[Outcome]],
    sar: Sequence[Outcome],
    source: Sequence[Outcome],
    corruptions: Sequence[str],
) -> None:
    rates = list(curve)
    accuracy = [top1(outcomes) for outcomes in curve.values()]
    above = [[value - reference for value, reference in zip(row, top1(sar))] for row in accuracy]
    for i, corruption in enumerate(corruptions):
        colour = HUES[i % len(HUES)]
        for axes, values in ((left, accuracy), (right, above)):
            axes.plot(rates, [row[i] for row in values], lw=0.8, marker="o", ms=2, color=colour, label=spoken(corruption))
    for axes, values in ((left, accuracy), (right, above)):
        axes.plot(rates, [statistics.fmean(row) for row in values], lw=2.4, marker="o", ms=4, color=INK, label="mean")
        axes.axvline(PAPERS_RATE, color=INK, lw=0.8, ls=":")
        axes.set_xscale("log")
        axes.set_xlabel("learning rate of the generators")
    left.axhline(mean(sar), color=INK, lw=1, ls="--", label="SAR, mean")
    left.axhline(mean(source), color="#7F7F7F", lw=1, ls="--", label="Source, mean")
    right.axhline(0, color=INK, lw=1, ls="--")
    right.axhline(mean(source) - mean(sar), color="#7F7F7F", lw=1, ls="--")
    left.set_ylabel("top-1 accuracy (%)")
    right.set_ylabel("DCT minus SAR (points)")
    left.set_title("Accuracy")
    right.set_title("Difference from SAR")
    left.figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)


# ---- ablation -----------------------------------------------------------------------------------------------------


def parts(scene: Scene) -> dict[str, dict[str, tuple[str, Mapping[str, Any]]]]:
    """The variants by what they are about. What equals DCT as it is here has its options, and so is its run."""
    vit = view(scene.source)
    depth, base = len(vit.blocks), tuned(scene, "dct")
    usual = create("dct", base).config

    def changed(**options: Any) -> tuple[str, Mapping[str, Any]]:
        return "dct", base if all(usual[name] == value for name, value in options.items()) else {**base, **options}

    def first(count: int) -> tuple[str, Mapping[str, Any]]:
        as_it_is = usual["blocks"] is None and count == len(leading_blocks(depth))
        return changed(blocks=None if as_it_is else count)

    counts = sorted({max(1, round(depth * quarter / 4)) for quarter in (1, 2, 3, 4)})
    return {
        "whole": {
            "Source": ("source", tuned(scene, "source")),
            "SAR: no conditioners": ("sar", tuned(scene, "sar")),
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
            "no filter of samples": changed(margin=math.log(vit.classes)),
        },
    }


def ablation(
    scene: Scene,
    corruptions: Sequence[str],
    *,
    severity: int | None = None,
    seed: int = 0,
    console: Console | None = None,
    store: str | os.PathLike[str] = STORE,
) -> Figure:
    """What each part of DCT is worth."""
    groups = parts(scene)
    variants = {name: variant for group in groups.values() for name, variant in group.items()}
    outcomes = run_all(scene, corruptions, variants, severity=severity, seed=seed, store=store, console=console)
    same = [name for name, variant in variants.items() if variant == variants["DCT"] and name != "DCT"]
    with drawing():
        canvas = new(7.2, 5.4)
        _draw_parts(canvas.subplots(), groups, outcomes, same, corruptions)
    paper = reported("ablation").averages
    base = variants["DCT"][1]
    return Figure(
        name="ablation",
        title="What each part of DCT is worth",
        caption=f"Top-1 accuracy as difference from DCT on the same pictures: a dot for each corruption, a diamond "
        f"for their mean, and at the right the mean itself. Below, each row changes one thing of DCT as it is used "
        f"here ({worded(base)}); hollow diamonds are DCT itself. Free vectors are keys and values that are learned "
        f"themselves, the same for every picture, with the generators' learning rate. "
        f"A conditioner left out is a key or value of zero. "
        f"Without the ascent (rho 0) the gradient is taken where the model stands; without the filter (margin ln C) every "
        f"picture is learned from, and the recovery by the moving average of the loss works as "
        f"before. No option was tuned again for a row. {BLIND} One seed: the standard error of "
        f"a mean is {uncertainty(outcomes['DCT']):.1f} points if a picture is right or wrong under all corruptions alike; "
        f"differences on the same pictures are surer than that, by how much was not measured. The paper's table "
        f"(ViT-B/16, ImageNet-C, severity 5, all 15 corruptions) has three of these rows: SAR {paper['sar']:g} %, "
        f"conditioners without generator {paper['dct(generator=False)']:g} %, DCT {paper['dct']:g} %. The other rows have "
        f"no counterpart in it.",
        rows=[
            {**row, "difference": row["accuracy"] - whole}
            for row, whole in zip(rows_of(variants, outcomes), cycle(top1(outcomes["DCT"])))
        ],
        canvas=canvas,
        findings=part_findings(outcomes, same),
        protocol=protocol_of(outcomes["DCT"], options=worded(base), sar=worded(variants["SAR: no conditioners"][1])),
    )


def part_findings(outcomes: Outcomes, same: Sequence[str]) -> list[str]:
    paper = reported("ablation").averages
    whole, sar, free = (mean(outcomes[name]) for name in ("DCT", "SAR: no conditioners", "free vectors, no generator"))
    said = paper["dct(generator=False)"] - paper["sar"], paper["dct"] - paper["sar"]
    gains = {name: mean(o) - whole for name, o in outcomes.items() if name not in (*same, "DCT", "Source")}
    worst, best = min(gains, key=lambda name: gains[name]), max(gains, key=lambda name: gains[name])
    alike = all(
        a.result.predictions == b.result.predictions
        for a, b in zip(outcomes["keys and values"], outcomes["queries, keys and values"])
    )
    return [
        f"Source {mean(outcomes['Source']):.1f} %, SAR {sar:.1f} %, DCT {whole:.1f} %. Over SAR, free vectors gain "
        f"{free - sar:+.1f} points and DCT {whole - sar:+.1f}; in the paper {said[0]:+.1f} and {said[1]:+.1f}.",
        f"Of the changed rows, {worst!r} has the lowest mean ({gains[worst]:+.1f} points from DCT) and {best!r} the highest "
        f"({gains[best]:+.1f}); the standard error of a mean is {uncertainty(outcomes['DCT']):.1f} points.",
        f"With and without the query conditioner the scores of all pictures {'are the same' if alike else 'differ'}.",
        f"Without the filter the model recovered {recoveries(outcomes['no filter of samples'])} times, with it "
        f"{recoveries(outcomes['DCT'])} times, over {len(outcomes['DCT'])} runs.",
    ]


def _draw_parts(
    axes: Axes,
    groups: Mapping[str, Mapping[str, Any]],
    outcomes: Outcomes,
    same: Sequence[str],
    corruptions: Sequence[str],
) -> None:
    whole = top1(outcomes["DCT"])
    y = 0.0
    places: dict[str, float] = {}
    for group in groups.values():
        for name in group:
            places[name] = y
            y += 1
        y += 0.5  # between what rows are about
    for name, at in places.items():
        differences = [value - reference for value, reference in zip(top1(outcomes[name]), whole)]
        for i, difference in enumerate(differences):
            label = spoken(corruptions[i]) if name == "Source" else None
            beside = at + 0.6 * ((i + 0.5) / len(differences) - 0.5)  # so that equal ones do not hide each other
            axes.plot(difference, beside, "o", ms=3, color=HUES[i % len(HUES)], label=label, zorder=3)
        hollow = name in (*same, "DCT")
        axes.plot(
            statistics.fmean(differences), at, "D", ms=6, mec=INK, mfc="none" if hollow else INK,
            label="mean" if name == "Source" else None,
        )  # fmt: skip
        axes.annotate(
            f"{mean(outcomes[name]):.1f}", (1, at), xycoords=("axes fraction", "data"), xytext=(24, 0),
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


# ---- cost ---------------------------------------------------------------------------------------------------------


def cost(scene: Scene, *, seed: int = 0, console: Console | None = None, rounds: int = ROUNDS) -> Figure:
    """What a step of each registered method costs, in plain forward passes."""
    costs, refused = measure_all(scene, seed=seed, console=console, rounds=rounds)
    minutes = {method: values[0] for method, values in reported("cost").rows.items()}
    unit = costs["tent"].ratio / minutes["tent"]
    scaled = {method: unit * value for method, value in minutes.items()}
    order = [*sorted(costs, key=lambda method: costs[method].ratio), *(m for m in refused if m in scaled)]
    batch = min(BATCH, len(scene.images.labels))
    with drawing():
        canvas = new(7.2, 0.8 + 0.21 * len(order))
        left, right = canvas.subplots(1, 2, sharey=True, width_ratios=(2, 1))
        _draw_costs(left, right, order, costs, scaled)
    return Figure(
        name="cost",
        title="What a step of each method costs",
        caption=f"Left: time of one step on a batch of {batch} pictures, in plain forward passes of the same batch through "
        f"the same model, on a logarithmic axis. Each step was timed between two plain passes; shown are the median and "
        f"the range of up to {rounds} rounds after one that does not count. A step that takes long is timed once, and its "
        f"ratio is uncertain by more than is shown. The plain pass takes the batch whole, while the library "
        f"cuts it for its threads, so that Source need not cost exactly one. Diamonds: the running times that "
        f"the paper gives for 50 000 pictures on an RTX 3090 (TENT {minutes['tent']:g}, SAR {minutes['sar']:g}, DCT "
        f"{minutes['dct']:g} min, MEMO {minutes['memo'] / 60:g} h, DDA {minutes['dda'] / 1440:g} days), scaled so that TENT "
        f"coincides: only their ratios compare, and the paper does not state its model and batch size. Right: memory that "
        f"the first step needed beyond what the process held before it; copies of the model that a method makes when it is "
        f"wrapped are not in it, and on a CPU this is coarse. "
        f"Costs depend on how many pictures a method rejects, here of {NOISE}. "
        + ("Not run: " + " ".join(f"{method}: {why}" for method, why in refused.items()) if refused else "All were run."),
        rows=[
            _cost_row(method, costs.get(method), refused.get(method), minutes.get(method)) for method in (*costs, *refused)
        ],
        canvas=canvas,
        findings=cost_findings(costs, minutes, refused),
        protocol={
            "model": scene.name,
            "device": str(next(scene.source.parameters()).device),
            "pictures": f"{NOISE}, severity {scene.severity}, batches of {batch}",
            "rounds": f"at most {rounds}",
            "options": "; ".join(f"{m}: {worded(o)}" for m, o in scene.options.items()) or "the defaults",
            "seed": str(seed),
        },
    )


def measure_all(
    scene: Scene, *, seed: int = 0, console: Console | None = None, rounds: int = ROUNDS
) -> tuple[dict[str, Cost], dict[str, str]]:
    """The cost of every method that can run here, and why the others cannot."""
    images = scene.batch(NOISE, count=BATCH * (rounds + 1))
    size = min(BATCH, len(images))
    batches = list(islice(cycle(part for part in images.split(size) if len(part) == size), rounds + 1))
    costs: dict[str, Cost] = {}
    refused: dict[str, str] = {}
    names = list_methods()
    for method in track(names, "cost of a step", console=console or Console(quiet=True), transient=True):
        try:
            costs[method] = measure(
                scene.source, method, batches, options=tuned(scene, method), mean=scene.mean, std=scene.std, seed=seed,
                source_statistics=scene.statistics_for(method, tuned(scene, method)),
            )  # fmt: skip
        except AcclimateError as error:
            refused[method] = str(error)
    for method in reported("cost").rows:
        if method not in names:
            refused[method] = "it is not a method of this library."
    return costs, refused


def cost_findings(costs: Mapping[str, Cost], minutes: Mapping[str, float], refused: Mapping[str, str]) -> list[str]:
    dearest = max(costs, key=lambda method: costs[method].ratio)
    over_sar, said = costs["dct"].ratio / costs["sar"].ratio, minutes["dct"] / minutes["sar"]
    idle = [m for m, found in costs.items() if not found.backward and find(m).optimizer is not Method.optimizer]
    shown = ", ".join(f"{method} {costs[method].ratio:.1f}" for method in ("source", "tent", "sar", "dct"))
    return [
        f"In plain forward passes: {shown}; {dearest} costs most, {costs[dearest].ratio:.0f}.",
        f"The median DCT step takes {over_sar:.2f} times as long as SAR's, in the paper {said:.2f} times; the rounds go "
        f"from {costs['sar'].least:.1f} to {costs['sar'].most:.1f} passes for SAR and from {costs['dct'].least:.1f} to "
        f"{costs['dct'].most:.1f} for DCT.",
        f"{len(costs)} methods were run"
        + (f", not {', '.join(refused)}" if refused else "")
        + (f"; {', '.join(idle)} rejected every picture, and cost more where they learn." if idle else "."),
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
