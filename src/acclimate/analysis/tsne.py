"""The paper's maps of class tokens and conditioners, and the numbers that a map cannot give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from ..data.corruptions import Integers
from ..data.domains import Subset
from ..errors import ConfigError, InputError
from ..models.families import view
from .embedding import (
    FOLDS,
    Array,
    Embedding,
    Separability,
    conditioned_blocks,
    embed,
    frequent,
    joined,
    require_sklearn,
    separability,
    standardised,
)
from .figures import HUES, INK, Figure, drawing, new, spoken
from .scene import BATCH, Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 200  # pictures in every domain at most
CLASSES = 10  # that get a colour; the others are grey
PERPLEXITY = 30
MODELS = {  # what is compared, and how it is drawn
    "source": ("source model", INK, "--", "o"),
    "each": ("adapted, one model per domain", HUES[1], "-", "s"),
    "one": ("adapted, one model for all domains", HUES[0], "-", "^"),
}
INPUTS = {"input": "generator input", "k": "key conditioner $C_k$", "v": "value conditioner $C_v$"}
GREY = "#c8c8c8"
Places = npt.NDArray[np.float64]
Measured = dict[tuple[str, int, str], Separability]  # by model, layer, and "domain" or "class"


@dataclass(frozen=True)
class Cloud:
    """Every picture in every domain, seen by every model: one row each, domain by domain."""

    domains: list[str]
    domain: Integers  # of every row, a number in `domains`
    picture: Integers
    label: Integers
    measurable: npt.NDArray[np.bool_] | None  # rows whose class has pictures enough for a probe; None: too few classes have
    embeddings: Mapping[str, Embedding]  # by model
    block: int | None  # whose conditioners were kept
    method: str  # with its options

    @property
    def depth(self) -> int:
        return max(self.embeddings["source"].class_tokens)


def draw(
    scene: Scene,
    corruptions: Sequence[str],
    method: str = "dct",
    *,
    severity: int | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> list[Figure]:
    """Maps of class tokens, how separable they are layer by layer, and maps of the conditioners, if the method has any.

    Args:
        scene: The model and the pictures.
        corruptions: The domains, two or more.
        method: What adapts.
        severity: By default the scene's.
        seed: Of the adaptation, the folds and the maps.
        console: Where progress is shown.
    """
    if len(corruptions) < 2:
        raise ConfigError(f"corruptions={list(corruptions)!r}: name two or more, between which there is a difference.")
    if len(scene.images.labels) < FOLDS:
        raise InputError(f"{len(scene.images.labels)} pictures are too few to measure with: give at least {FOLDS}.")
    require_sklearn()
    with drawing():
        cloud = gather(scene, corruptions, method, severity=severity, seed=seed, console=console)
        protocol = _protocol(scene, cloud, severity, seed)
        measured = measure(cloud, seed=seed, console=console)
        figures = [
            _class_tokens(scene, cloud, measured, method, protocol, seed, console),
            _separability(cloud, measured, method, protocol),
        ]
        if cloud.block is not None:
            figures.append(_conditioners(cloud, cloud.block, protocol, seed, console))
        return figures


# ---- numbers ----------------------------------------------------------------------------------------------------


def gather(
    scene: Scene,
    corruptions: Sequence[str],
    method: str,
    *,
    severity: int | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> Cloud:
    """Adapt to each domain from the source, and to all of them in a row, and keep what the class tokens became."""
    domains = [scene.domain(name, severity) for name in corruptions]
    depth = len(view(scene.source).blocks)
    layers = range(1, depth + 1)
    shown = [Subset(domain, min(SHOWN, len(domain.labels))) for domain in domains]
    numbers = np.arange(len(shown[0].labels))
    device = next(scene.source.parameters()).device
    wanderer = scene.wandered(method, domains, seed=seed, console=console)
    # the first block's class token is the same for every picture, and so are its conditioners
    block = next((number for number in conditioned_blocks(wanderer) if number), None)
    blocks = [] if block is None else [block]
    kept: dict[str, list[Embedding]] = {name: [] for name in MODELS}
    for name, some in zip(corruptions, shown):
        images = some.load(numbers).to(device)
        adapter = scene.adapted(method, name, severity, seed=seed, console=console)
        kept["source"].append(embed(scene.source, images, layers=layers, console=console))
        kept["each"].append(embed(adapter, images, layers=layers, blocks=blocks, console=console))
        kept["one"].append(embed(wanderer, images, layers=layers, blocks=blocks, console=console))
    label, picture = np.concatenate([some.labels for some in shown]), np.tile(numbers, len(shown))
    measurable = frequent(label, picture)
    return Cloud(
        domains=list(corruptions),
        domain=np.repeat(np.arange(len(shown)), len(numbers)),
        picture=picture,
        label=label,
        measurable=measurable if scene.labelled and len(np.unique(label[measurable])) > 1 else None,
        embeddings={name: joined(each) for name, each in kept.items()},
        block=block,
        method=f"{method}({wanderer.method.extra_repr()})",
    )


def measure(cloud: Cloud, *, seed: int = 0, console: Console | None = None) -> Measured:
    """How well the class tokens of every model and layer tell domains apart, and classes, if there are any."""
    found: Measured = {}
    work = [(model, layer) for model in cloud.embeddings for layer in range(1, cloud.depth + 1)]
    for model, layer in track(work, "probes", console=console or Console(quiet=True), transient=True):
        points, rows = cloud.embeddings[model].class_tokens[layer], cloud.measurable
        found[model, layer, "domain"] = separability(points, cloud.domain, cloud.picture, seed=seed)
        if rows is not None:
            found[model, layer, "class"] = separability(points[rows], cloud.label[rows], cloud.picture[rows], seed=seed)
    return found


def chosen_layers(depth: int) -> list[int]:
    """The paper's layers 1, 3, 6, 11 and 12 of 12, or those at the same share of the depth."""
    return sorted({max(1, round(layer * depth / 12)) for layer in (1, 3, 6, 11, 12)})


def plane(points: Array, *, seed: int = 0) -> Places:
    """t-SNE: places in a plane, (count, 2), where near points stay near; distances and sizes of groups mean little."""
    from sklearn.manifold import TSNE

    even = standardised(points)
    if not even.any():
        return np.zeros((len(points), 2))  # all are the same point
    return TSNE(perplexity=_perplexity(len(points)), init="pca", random_state=seed).fit_transform(even).astype(np.float64)


def _perplexity(count: int) -> float:
    return min(PERPLEXITY, (count - 1) / 3)


# ---- figures ----------------------------------------------------------------------------------------------------


def _class_tokens(
    scene: Scene,
    cloud: Cloud,
    measured: Measured,
    method: str,
    protocol: Mapping[str, str],
    seed: int,
    console: Console | None,
) -> Figure:
    panels = [("each", layer) for layer in chosen_layers(cloud.depth)] + [("source", cloud.depth)]
    shown = track(panels, "t-SNE", console=console or Console(quiet=True), transient=True)
    maps = {panel: plane(cloud.embeddings[panel[0]].class_tokens[panel[1]], seed=seed) for panel in shown}
    colourings = {"domain": (cloud.domain, _domain_names(cloud))}
    if scene.labelled:
        colourings["class"] = _most_frequent(cloud.label, scene.classes)
    canvas = new(1.45 * len(panels) + 1.5, 1.75 * len(colourings) + 0.35)
    grid = canvas.subplots(len(colourings), len(panels), squeeze=False)
    for row, (what, (kinds, names)) in zip(grid, colourings.items()):
        for axes, panel in zip(row, panels):
            _scatter(axes, maps[panel], kinds)
            if what == "domain":
                axes.set_title(f"{method if panel[0] == 'each' else 'source'}, layer {panel[1]}")
            value = measured.get((*panel, what))
            if value is not None:
                axes.set_xlabel(f"probe {100 * value.accuracy:.0f} %", fontsize=8)
        row[0].set_ylabel(f"by {what}")
        _legend(row[-1], names)
    rows = [
        dict(model=model, layer=layer, picture=int(p), domain=cloud.domains[d], label=int(c), x=float(x), y=float(y))
        for (model, layer), places in maps.items()
        for p, d, c, (x, y) in zip(cloud.picture, cloud.domain, cloud.label, places)
    ]
    caption = (
        f"t-SNE maps of the class tokens of {_amount(cloud)}, each in {len(cloud.domains)} domains, after some layers of "
        f"the models that {method} adapted, one model for each domain (the last layer: what enters the head), and after the "
        "last layer of the source model. Each point is a picture in a domain; the rows show the same maps in other colours. "
        "Below a map: how many of the points a linear probe assigns correctly in the full space, on pictures that it was "
        "not fitted to. Every dimension was brought to variance 1; perplexity "
        f"{_perplexity(len(cloud.domain)):.0f}, seed {seed}. A map keeps neighbours: distances between groups, and their "
        "sizes, mean little, and mixed groups on a map may be "
        "separable. The adapted points of different domains come from different models, so that a difference between "
        "domains may be one between models; the figure of separability has one model for all as a control."
    )
    findings = [_along("domain", measured, method, chosen_layers(cloud.depth))]
    if cloud.measurable is not None:
        findings.append(_along("class", measured, method, chosen_layers(cloud.depth)))
    return Figure("class-tokens", "Class tokens, layer by layer", caption, rows, canvas, findings, protocol)


def _along(what: str, measured: Measured, method: str, layers: Sequence[int]) -> str:
    values = [measured["each", layer, what] for layer in layers]
    source = measured["source", layers[-1], what]
    return (
        f"A linear probe tells the {what} from the class token after layers {_list(layers)} of the models adapted by "
        f"{method} in {_list([f'{100 * value.accuracy:.0f}' for value in values])} % of cases, and after layer "
        f"{layers[-1]} of the source model in {100 * source.accuracy:.0f} % (chance: {100 * source.chance:.0f} %)."
    )


def _separability(cloud: Cloud, measured: Measured, method: str, protocol: Mapping[str, str]) -> Figure:
    kinds = ["domain"] if cloud.measurable is None else ["domain", "class"]
    layers = list(range(1, cloud.depth + 1))
    canvas = new(3.6 * len(kinds) + 0.4, 5.2)
    grid = canvas.subplots(2, len(kinds), squeeze=False, sharex=True, sharey="row")
    for what, (upper, lower) in zip(kinds, grid.T):
        for model, (name, colour, line, marker) in MODELS.items():
            values = [measured[model, layer, what] for layer in layers]
            accuracy, deviation = (
                100 * np.array([getattr(value, key) for value in values]) for key in ("accuracy", "deviation")
            )
            style: Any = dict(color=colour, linestyle=line, marker=marker, markersize=3.5)
            upper.plot(layers, accuracy, label=name, **style)
            upper.fill_between(layers, accuracy - deviation, accuracy + deviation, color=colour, alpha=0.12, linewidth=0)
            lower.plot(layers, [value.silhouette for value in values], **style)
        upper.axhline(100 * values[0].chance, color="#7F7F7F", linestyle=":", linewidth=1.2, label="chance")
        lower.axhline(0, color="#7F7F7F", linestyle=":", linewidth=1.2)
        upper.set_title("Domains" if what == "domain" else "Classes")
        lower.set_xlabel("layer (after so many blocks)")
        lower.set_xticks(layers if len(layers) <= 12 else layers[1::2])
    grid[0, 0].set_ylabel("accuracy of a linear probe (%)")
    grid[0, 0].set_ylim(0, 103)
    grid[1, 0].set_ylabel("silhouette score")
    handles, names = grid[0, 0].get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside lower center", ncols=2)
    canvas.align_ylabels(grid[:, 0])
    rows = [dict(model=model, layer=layer, of=what, **asdict(value)) for (model, layer, what), value in measured.items()]
    caption = (
        f"How well the class token after each layer tells the {len(cloud.domains)} domains apart (left), and the classes of "
        f"the pictures (right), measured in the full space on {_amount(cloud)} in every domain. "
        if len(kinds) == 2
        else f"How well the class token after each layer tells the {len(cloud.domains)} domains apart, measured in the full "
        f"space on {_amount(cloud)} in every domain; their classes are not known, or have too few pictures. "
    ) + (
        f"Above: accuracy of a logistic regression, {FOLDS}-fold cross-validated so that all versions of a picture are on "
        "one side of a split; the bands are the standard deviation over the folds, the dotted line is always naming the "
        "most frequent kind. Below: silhouette score, which is 1 for tight groups far apart and 0 for none. Every dimension "
        "was brought to variance 1 first; the last layer is what enters the head. Where each domain has a model of its own, "
        "the probe may tell the models apart instead of the pictures; with one model for all domains, adapted to them one "
        "after another, it cannot. Being readable by a probe does not mean that the head uses it."
    )
    return Figure(
        "separability",
        "What class tokens tell of domain and class",
        caption,
        rows,
        canvas,
        [finding for what in kinds for finding in _compared(what, measured, method, cloud.depth)],
        protocol,
    )


def _compared(what: str, measured: Measured, method: str, depth: int) -> list[str]:
    source, each, one = (measured[model, depth, what] for model in MODELS)
    first = measured["source", 1, what]

    def against(value: Separability) -> str:
        points = 100 * (value.accuracy - source.accuracy)
        within = max(value.deviation, source.deviation) >= abs(value.accuracy - source.accuracy)
        return f"{points:+.1f} points{', within the deviation over the folds' if within else ''}"

    return [
        f"{what.capitalize()}, by a linear probe: the source model goes from {100 * first.accuracy:.1f} % after layer 1 to "
        f"{100 * source.accuracy:.1f} % after layer {depth} (chance {100 * source.chance:.1f} %); adapted by {method}, "
        f"layer {depth} gives {100 * each.accuracy:.1f} % with one model per domain ({against(each)}) and "
        f"{100 * one.accuracy:.1f} % with one for all ({against(one)}).",
        f"{what.capitalize()}, silhouette after layer {depth}: source {source.silhouette:.3f}, one model per domain "
        f"{each.silhouette:.3f}, one for all {one.silhouette:.3f} (source after layer 1: {first.silhouette:.3f}).",
    ]


def _conditioners(cloud: Cloud, block: int, protocol: Mapping[str, str], seed: int, console: Console | None) -> Figure:
    panels = [(model, part) for model in ("each", "one") for part in INPUTS]
    shown = track(panels, "t-SNE", console=console or Console(quiet=True), transient=True)
    points = {(model, part): cloud.embeddings[model].conditioners[block, part] for model, part in panels}
    maps = {panel: plane(points[panel], seed=seed) for panel in shown}
    found = {panel: separability(points[panel], cloud.domain, cloud.picture, seed=seed) for panel in panels}
    canvas = new(7.6, 4.6)
    grid = canvas.subplots(2, len(INPUTS))
    for axes, panel in zip(grid.flat, panels):
        _scatter(axes, maps[panel], cloud.domain)
        axes.set_xlabel(f"probe {100 * found[panel].accuracy:.0f} %, silhouette {found[panel].silhouette:.2f}", fontsize=8)
    for axes, name in zip(grid[0], INPUTS.values()):
        axes.set_title(name)
    for axes, name in zip(grid[:, 0], ("one model per domain", "one model for all (control)")):
        axes.set_ylabel(name)
    _legend(grid[0, -1], _domain_names(cloud))
    rows = [
        dict(model=model, part=part, block=block, picture=int(p), domain=cloud.domains[d], x=float(x), y=float(y),
             accuracy=found[model, part].accuracy, silhouette=found[model, part].silhouette)
        for (model, part), places in maps.items()
        for p, d, (x, y) in zip(cloud.picture, cloud.domain, places)
    ]  # fmt: skip
    caption = (
        f"t-SNE maps of the conditioners of layer {block + 1} for {_amount(cloud)}, each in {len(cloud.domains)} domains, "
        "and of the class token, behind the first norm of the layer, that they are made from. Upper row: each domain has a "
        "model that was adapted to it from the source, and its points are made by that model, so that groups may be models. "
        "Lower row, the control: all points are made by one model, adapted to all domains one after another, so that groups "
        "are what the pictures say. Below a map: how many domains a cross-validated linear probe tells correctly in the "
        f"full space (chance {100 / len(cloud.domains):.0f} %), and the silhouette score of the domains there. Every "
        f"dimension was brought to variance 1; perplexity {_perplexity(len(cloud.domain)):.0f}, seed {seed}. Left out: the "
        "conditioners of layer 1, which are one vector in each model, because the class token there is the same for every "
        "picture; and the query conditioner, which has no effect on the output and is never trained. Groups in either would "
        "be no evidence. Within one model a conditioner is a linear function of the class token: it can lose what that "
        "tells of the domain, and add nothing."
    )
    findings = [_between(part, found) for part in ("k", "v")]
    return Figure("conditioners", "Conditioners by domain", caption, rows, canvas, findings, protocol)


def _between(part: str, found: Mapping[tuple[str, str], Separability]) -> str:
    each, one, made_from = found["each", part], found["one", part], found["one", "input"]
    return (
        f"C_{part}: with one model per domain a linear probe tells the domain in {100 * each.accuracy:.1f} % of cases "
        f"(silhouette {each.silhouette:.3f}), with one model for all in {100 * one.accuracy:.1f} % ({one.silhouette:.3f}); "
        f"from the class token that this one is made from, in {100 * made_from.accuracy:.1f} % ({made_from.silhouette:.3f})."
    )


def _protocol(scene: Scene, cloud: Cloud, severity: int | None, seed: int) -> dict[str, str]:
    return {
        "model": scene.name,
        "pictures": f"{len(scene.images.labels)} to adapt to, in one pass; {_amount(cloud)} shown and measured",
        "corruptions": ", ".join(cloud.domains),
        "severity": str(severity or scene.severity),
        "method": cloud.method,
        "batch": str(BATCH),
        "seed": str(seed),
        "t-SNE": f"perplexity {_perplexity(len(cloud.domain)):.0f}, started from the principal components",
        "probe": f"logistic regression with L2 penalty 1, {FOLDS} folds by picture",
    }


# ---- marks ------------------------------------------------------------------------------------------------------


def _look(kind: int) -> tuple[str, str]:
    """Colour and marker: when the colours are used up, the next marker begins."""
    return (GREY, "o") if kind < 0 else (HUES[kind % len(HUES)], "o^sDv"[kind // len(HUES) % 5])


def _scatter(axes: Axes, places: Places, kinds: Integers) -> None:
    order = np.random.RandomState(0).permutation(len(kinds))  # so that no kind lies on top of all others
    looks = [_look(kind) for kind in kinds[order]]
    for marker in dict.fromkeys(marker for _, marker in looks):
        which = [i for i, (_, other) in enumerate(looks) if other == marker]
        x, y = places[order[which]].T
        colours = [looks[i][0] for i in which]
        axes.scatter(x, y, s=6, c=colours, marker=marker, linewidths=0, alpha=0.75, rasterized=True)
    axes.set(xticks=[], yticks=[])
    axes.spines[["top", "right"]].set_visible(True)


def _legend(axes: Axes, names: Mapping[int, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", marker=_look(kind)[1], color=_look(kind)[0], markersize=5, label=name)
        for kind, name in names.items()
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, handletextpad=0.1)


def _most_frequent(labels: Integers, names: Sequence[str]) -> tuple[Integers, dict[int, str]]:
    """The classes that get a colour, numbered anew; the others are -1."""
    values, counts = np.unique(labels, return_counts=True)
    shown = np.sort(values[np.argsort(-counts, kind="stable")][:CLASSES])
    kinds = np.full_like(labels, -1)
    for i, value in enumerate(shown):
        kinds[labels == value] = i
    legend = {i: names[value] if value < len(names) else f"class {value}" for i, value in enumerate(shown)}
    return kinds, legend if len(shown) == len(values) else {**legend, -1: f"{len(values) - len(shown)} others"}


def _domain_names(cloud: Cloud) -> dict[int, str]:
    return {i: spoken(name) for i, name in enumerate(cloud.domains)}


def _list(items: Sequence[object]) -> str:
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _amount(cloud: Cloud) -> str:
    return f"{len(np.unique(cloud.picture))} pictures"
