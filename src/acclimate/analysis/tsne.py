"""Class tokens and conditioners by domain and by class: the paper's maps, and the numbers that a map cannot give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, InputError
from .clouds import EACH, ONE, SOURCE, Cloud, Measured, chosen_layers, gather, measure, plane
from .embedding import FOLDS, Separability, require_sklearn, separability
from .figures import HUES, INK, Figure, drawing, new, spoken
from .intervals import Adaptation, enough, seen
from .registry import CORRUPTIONS, FIVE, METHOD, SEED, SEVERITY, FigureKind
from .scatter import legend, most_frequent, scatter
from .subject import BATCH, Subject

STYLES = {  # of the models: name, colour, line, marker
    SOURCE: ("source model", INK, "--", "o"),
    EACH: ("adapted, one model per domain", HUES[1], "-", "s"),
    ONE: ("adapted, one model for all domains", HUES[0], "-", "^"),
}
INPUTS = {"input": "generator input", "k": "key conditioner $C_k$", "v": "value conditioner $C_v$"}


def draw(
    subject: Subject,
    *,
    corruptions: Sequence[str] = FIVE,
    method: str = "dct",
    severity: int | None = None,
    seed: int = 0,
) -> list[Figure]:
    """Draw maps of class tokens, how separable they are layer by layer, and maps of conditioners, if there are any.

    Args:
        subject: The model and the images.
        corruptions: The domains, two or more.
        method: What adapts.
        severity: By default that of the data.
        seed: Of the adaptation, the folds and the maps.
    """
    if len(corruptions) < 2:
        raise ConfigError(f"corruptions={list(corruptions)!r}: name two or more, between which there is a difference.")
    if subject.count < FOLDS:
        raise InputError(f"{subject.count} images are too few to measure with: give at least {FOLDS}.")
    require_sklearn()
    severity = subject.severity(severity)
    with drawing():
        cloud = gather(subject, corruptions, method, severity=severity, seed=seed)
        measured = measure(subject, cloud, seed=seed)
        how = {"protocol": _protocol(subject, cloud, severity, seed), "origin": subject.origin}
        figures = [
            _class_tokens(subject, cloud, measured, method, seed, how),
            _separability(cloud, measured, method, how),
        ]
        if cloud.block is not None:
            figures.append(_conditioners(subject, cloud, cloud.block, seed, how))
        return figures


def _class_tokens(
    subject: Subject, cloud: Cloud, measured: Measured, method: str, seed: int, how: Mapping[str, Any]
) -> Figure:
    panels = [(EACH, layer) for layer in chosen_layers(cloud.depth)] + [(SOURCE, cloud.depth)]
    shown = subject.track(panels, "t-SNE")
    maps = {(model, layer): plane(cloud.embeddings[model].class_tokens[layer], seed=seed) for model, layer in shown}
    colourings = {"domain": (cloud.domain, _domain_names(cloud))}
    if subject.labelled:
        colourings["class"] = most_frequent(cloud.label, subject.data.class_names)
    canvas = new(1.45 * len(panels) + 1.5, 1.75 * len(colourings) + 0.35)
    grid = canvas.subplots(len(colourings), len(panels), squeeze=False)
    for row, (what, (kinds, names)) in zip(grid, colourings.items()):
        for axes, panel in zip(row, panels):
            scatter(axes, maps[panel], kinds)
            if what == "domain":
                axes.set_title(f"{method if panel[0] == EACH else 'source'}, layer {panel[1]}")
            value = measured.get((*panel, what))
            if value is not None:
                axes.set_xlabel(f"probe {100 * value.accuracy:.0f} %", fontsize=8)
        row[0].set_ylabel(f"by {what}")
        legend(row[-1], names)
    rows = [
        dict(model=model, layer=layer, image=int(i), domain=cloud.domains[d], label=int(c), x=float(x), y=float(y))
        for (model, layer), places in maps.items()
        for i, d, c, (x, y) in zip(cloud.image, cloud.domain, cloud.label, places)
    ]
    caption = (
        f"t-SNE maps of the class tokens of {cloud.images} images, each in {len(cloud.domains)} domains, after some layers "
        f"of the models that {method} adapted, one model for each domain (the last layer: what enters the head), and after "
        "the last layer of the source model. Each point is an image in a domain; the rows show the same maps in other "
        "colours. Below a map: how many of the points a linear probe assigns correctly in the full space, on images that "
        f"it was not fitted to. Every dimension was brought to variance 1; perplexity {cloud.perplexity:.0f}, seed {seed}. "
        "A map keeps neighbours: distances between groups, and their sizes, mean little, and mixed groups on a map may be "
        "separable. The adapted points of different domains come from different models, so that a difference between "
        "domains may be one between models; the figure of separability has one model for all as a control."
    )
    findings = [_along("domain", measured, method, chosen_layers(cloud.depth))]
    if cloud.measurable is not None:
        findings.append(_along("class", measured, method, chosen_layers(cloud.depth)))
    return Figure("class-tokens", "Class tokens, layer by layer", caption, rows, canvas, findings, **how)


def _along(what: str, measured: Measured, method: str, layers: Sequence[int]) -> str:
    values = [measured[EACH, layer, what] for layer in layers]
    source = measured[SOURCE, layers[-1], what]
    return (
        f"A linear probe tells the {what} from the class token after layers {_list(layers)} of the models adapted by "
        f"{method} in {_list([f'{100 * value.accuracy:.0f}' for value in values])} % of cases, and after layer "
        f"{layers[-1]} of the source model in {100 * source.accuracy:.0f} % (chance: {100 * source.chance:.0f} %)."
    )


def _separability(cloud: Cloud, measured: Measured, method: str, how: Mapping[str, Any]) -> Figure:
    kinds = ["domain"] if cloud.measurable is None else ["domain", "class"]
    layers = list(range(1, cloud.depth + 1))
    canvas = new(3.6 * len(kinds) + 0.4, 5.2)
    grid = canvas.subplots(2, len(kinds), squeeze=False, sharex=True, sharey="row")
    for what, (upper, lower) in zip(kinds, grid.T):
        for model, (name, colour, line, marker) in STYLES.items():
            values = [measured[model, layer, what] for layer in layers]
            accuracy, low, high, _ = zip(*(value.interval() for value in values))
            style: Any = dict(color=colour, linestyle=line, marker=marker, markersize=3.5)
            upper.plot(layers, accuracy, label=name, **style)
            upper.fill_between(layers, low, high, color=colour, alpha=0.12, linewidth=0)
            lower.plot(layers, [value.silhouette for value in values], **style)
        upper.axhline(values[0].chance, color="#7F7F7F", linestyle=":", linewidth=1.2, label="chance")
        lower.axhline(0, color="#7F7F7F", linestyle=":", linewidth=1.2)
        upper.set_title("Domains" if what == "domain" else "Classes")
        lower.set_xlabel("layer (after so many blocks)")
        lower.set_xticks(layers if len(layers) <= 12 else layers[1::2])
    grid[0, 0].set_ylabel("accuracy of a linear probe (%)")
    grid[0, 0].set_ylim(0, 1.03)
    grid[0, 0].yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}")
    grid[1, 0].set_ylabel("silhouette score")
    handles, names = grid[0, 0].get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside lower center", ncols=2)
    canvas.align_ylabels(grid[:, 0])
    rows = [
        dict(model=model, layer=layer, of=what, accuracy=value.accuracy, low=value.interval().low,
             high=value.interval().high, chance=value.chance, silhouette=value.silhouette)
        for (model, layer, what), value in measured.items()
    ]  # fmt: skip
    caption = (
        f"How well the class token after each layer tells the {len(cloud.domains)} domains apart (left), and the classes of "
        f"the images (right), measured in the full space on {cloud.images} images in every domain. "
        if len(kinds) == 2
        else f"How well the class token after each layer tells the {len(cloud.domains)} domains apart, measured in the full "
        f"space on {cloud.images} images in every domain; their classes are not known, or have too few images. "
    ) + (
        f"Above: accuracy of a logistic regression, {FOLDS}-fold cross-validated so that all versions of an image are on "
        "one side of a split; the bands are 95 % intervals over images, the dotted line is always naming the most frequent "
        "kind. Below: silhouette score, which is 1 for tight groups far apart and 0 for none. Every dimension "
        "was brought to variance 1 first; the last layer is what enters the head. Where each domain has a model of its own, "
        "the probe may tell the models apart instead of the images; with one model for all domains, adapted to them one "
        "after another, it cannot. Being readable by a probe does not mean that the head uses it."
    )
    return Figure(
        "separability",
        "What class tokens tell of domain and class",
        caption,
        rows,
        canvas,
        [finding for what in kinds for finding in compared(what, measured, method, cloud.depth, cloud.adaptations)],
        **how,
    )


def compared(what: str, measured: Measured, method: str, depth: int, adaptations: Mapping[str, Adaptation]) -> list[str]:
    """Return how the adapted models differ from the source model in what their class tokens tell, in sentences."""
    source, each, one = (measured[model, depth, what] for model in STYLES)
    first = measured[SOURCE, 1, what]

    def against(model: str, value: Separability) -> str:
        more = value.over(source)
        if not enough(more, adaptations[model]):
            meaning = "; too few images or steps to say whether it is more than chance"
        else:
            meaning = "" if seen(more, adaptations[model]) else "; a difference is not seen"
        return f"{more.text('points', 1, 100)}{meaning}"

    return [
        f"{what.capitalize()}, by a linear probe: the source model goes from {100 * first.accuracy:.1f} % after layer 1 to "
        f"{100 * source.accuracy:.1f} % after layer {depth} (chance {100 * source.chance:.1f} %); adapted by {method}, "
        f"layer {depth} gives {100 * each.accuracy:.1f} % with one model per domain, {against(EACH, each)}, and "
        f"{100 * one.accuracy:.1f} % with one for all, {against(ONE, one)}.",
        f"{what.capitalize()}, silhouette after layer {depth}: source {source.silhouette:.3f}, one model per domain "
        f"{each.silhouette:.3f}, one for all {one.silhouette:.3f} (source after layer 1: {first.silhouette:.3f}).",
    ]


def _conditioners(subject: Subject, cloud: Cloud, block: int, seed: int, how: Mapping[str, Any]) -> Figure:
    panels = [(model, part) for model in (EACH, ONE) for part in INPUTS]
    points = {(model, part): cloud.embeddings[model].conditioners[block, part] for model, part in panels}
    maps = {panel: plane(points[panel], seed=seed) for panel in subject.track(panels, "t-SNE")}
    found = {panel: separability(points[panel], cloud.domain, cloud.image, seed=seed) for panel in panels}
    canvas = new(7.6, 4.6)
    grid = canvas.subplots(2, len(INPUTS))
    for axes, panel in zip(grid.flat, panels):
        scatter(axes, maps[panel], cloud.domain)
        axes.set_xlabel(f"probe {100 * found[panel].accuracy:.0f} %, silhouette {found[panel].silhouette:.2f}", fontsize=8)
    for axes, name in zip(grid[0], INPUTS.values()):
        axes.set_title(name)
    for axes, name in zip(grid[:, 0], ("one model per domain", "one model for all (control)")):
        axes.set_ylabel(name)
    legend(grid[0, -1], _domain_names(cloud))
    rows = [
        dict(model=model, part=part, block=block, image=int(i), domain=cloud.domains[d], x=float(x), y=float(y),
             accuracy=found[model, part].accuracy, silhouette=found[model, part].silhouette)
        for (model, part), places in maps.items()
        for i, d, (x, y) in zip(cloud.image, cloud.domain, places)
    ]  # fmt: skip
    caption = (
        f"t-SNE maps of the conditioners of layer {block + 1} for {cloud.images} images, each in {len(cloud.domains)} "
        "domains, and of the class token, behind the first norm of the layer, that they are made from. Upper row: each "
        "domain has a model that was adapted to it from the source, and its points are made by that model, so that groups "
        "may be models. Lower row, the control: all points are made by one model, adapted to all domains one after "
        "another, so that groups are what the images say. Below a map: how many domains a cross-validated linear probe "
        f"tells correctly in the full space (chance {100 / len(cloud.domains):.0f} %), and the silhouette score of the "
        f"domains there. Every dimension was brought to variance 1; perplexity {cloud.perplexity:.0f}, seed {seed}. Left "
        "out: the conditioners of layer 1, which are one vector in each model, because the class token there is the same "
        "for every image; and the query conditioner, which has no effect on the output and is never trained. Groups in "
        "either would be no evidence. Within one model a conditioner is a linear function of the class token: it can lose "
        "what that tells of the domain, and add nothing."
    )
    findings = [_between(part, found) for part in ("k", "v")]
    return Figure("conditioners", "Conditioners by domain", caption, rows, canvas, findings, **how)


def _between(part: str, found: Mapping[tuple[str, str], Separability]) -> str:
    each, one, made_from = found[EACH, part], found[ONE, part], found[ONE, "input"]
    return (
        f"C_{part}: with one model per domain a linear probe tells the domain in {100 * each.accuracy:.1f} % of cases "
        f"(silhouette {each.silhouette:.3f}), with one model for all in {100 * one.accuracy:.1f} % ({one.silhouette:.3f}); "
        f"from the class token that this one is made from, in {100 * made_from.accuracy:.1f} % ({made_from.silhouette:.3f})."
    )


def _protocol(subject: Subject, cloud: Cloud, severity: int, seed: int) -> dict[str, str]:
    return subject.protocol(
        measured=f"{cloud.images} images of each domain",
        corruptions=f"{', '.join(cloud.domains)}, severity {severity}",
        method=cloud.method,
        stream=f"one pass in batches of {BATCH}, in random order",
        seed=str(seed),
        map=f"t-SNE, perplexity {cloud.perplexity:.0f}, started from the principal components",
        probe=f"logistic regression with L2 penalty 1, {FOLDS} folds by image",
    )


def _domain_names(cloud: Cloud) -> dict[int, str]:
    return {i: spoken(name) for i, name in enumerate(cloud.domains)}


def _list(items: Sequence[object]) -> str:
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


FIGURE = FigureKind(
    name="tsne",
    help="class tokens and conditioners by domain and by class, with the numbers that a map cannot give",
    position=30,
    draw=draw,
    draws=("class-tokens", "separability", "conditioners"),
    arguments=(METHOD, CORRUPTIONS, SEVERITY, SEED),
)
