"""How far attention looks, block by block: on clean images, on corrupted ones, and after adaptation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .attention import Layout, Reach, attention_maps, in_parts, reach
from .figures import HUES, INK, Figure, drawing, new
from .intervals import TOO_FEW, Adaptation, Floats, Interval, bootstrap, enough, paired, seen, verdict
from .registry import CORRUPTION, METHOD, SEED, SEVERITY, FigureKind
from .subject import BATCH, Subject, worded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MEASURED = 128  # images, as in the paper; with four times as many, the bundled model's means move by less than 0.03 pixels
SEVERITIES = (1, 2, 3, 4, 5)
CLEAN = "clean"
LARGELY, IN_PART = 0.5, 0.1  # shares of a gap that have to be closed to be called so


def draw(
    subject: Subject, *, corruption: str = "defocus_blur", method: str = "dct", severity: int | None = None, seed: int = 0
) -> list[Figure]:
    """Draw distance against depth: clean, at all severities, and adapted at one of them."""
    severity = subject.severity(severity)
    clean = subject.batch(count=MEASURED)
    corrupted = {s: subject.batch(corruption, s, count=MEASURED) for s in SEVERITIES}
    adapter = subject.adapted(method, [subject.domain(corruption, severity)], seed=seed)
    after, before = f"{method}, severity {severity}", _before(method)
    adaptation, outcome = Adaptation.of(adapter), subject.agreement(adapter, clean, corrupted[severity])
    cases: list[tuple[str, nn.Module, Tensor]] = [(CLEAN, subject.model, clean)]
    cases += [(f"severity {s}", subject.model, corrupted[s]) for s in SEVERITIES]
    cases += [(after, adapter, corrupted[severity]), (before, adapter, corrupted[severity])]
    profiles: dict[str, Reach] = {}
    for name, model, images in subject.track(cases, "attention"):
        if name == before:
            adapter.reset()
        profiles[name] = profile(model, images)
    adds = bool(profiles[before].on_added.any())
    if not adds:
        del profiles[before]  # without added keys, that is the source model
    with drawing():
        canvas = _drawn(profiles, after, before)
    figure = Figure(
        name="attention-distance",
        title=f"How far attention looks: {corruption}, and {method}",
        caption=_caption(subject, corruption, method, severity, adds),
        rows=rows(profiles),
        canvas=canvas,
        findings=findings(profiles, corruption, method, severity, adaptation, outcome),
        protocol=subject.protocol(
            measured=f"{len(clean)} images",
            corruption=f"{corruption}, severity {severity}",
            method=worded(adapter),
            stream=f"one pass in batches of {BATCH}, in random order",
            seed=str(seed),
        ),
        origin=subject.origin,
    )
    return [figure]


def profile(model: nn.Module, images: Tensor) -> Reach:
    """Return how far each head of each block looks in each image: (images, blocks, heads) each, in float64."""
    layout = Layout.of(model, images)
    parts = []
    for part in in_parts(model, images):
        blocks = [reach(attention, layout) for _, attention in attention_maps(model, part)]
        parts.append([torch.stack(values, dim=1) for values in zip(*blocks)])
    return Reach(*(torch.cat(values).double().cpu() for values in zip(*parts)))


def rows(profiles: Mapping[str, Reach]) -> list[dict[str, Any]]:
    """Return a row for each case, block and head: means over the images."""
    found = []
    for case, measured in profiles.items():
        means = {name: values.mean(0) for name, values in measured._asdict().items()}
        for block, head in torch.cartesian_prod(*map(torch.arange, measured.distance.shape[1:])).tolist():
            at = {name: float(values[block, head]) for name, values in means.items()}
            found.append({"case": case, "block": block + 1, "head": head + 1, **at})
    return found


def findings(
    profiles: Mapping[str, Reach], corruption: str, method: str, severity: int, adaptation: Adaptation, outcome: str
) -> list[str]:
    """Return what the profiles say of the paper's account, in sentences; `outcome` says what came of the adaptation."""
    clean, here = profiles[CLEAN], profiles[f"severity {severity}"]
    adapted = profiles[f"{method}, severity {severity}"]
    grown = change(profiles[f"severity {SEVERITIES[-1]}"].distance, clean.distance)
    by_severity = ", ".join(f"{float(profiles[f'severity {s}'].distance.mean()):.2f}" for s in SEVERITIES)
    raw, renormalised = ((_gap(a, c), _gap(b, c)) for a, b, c in _by_kind(here, adapted, clean))
    closed = 1 - renormalised[1] / renormalised[0] if renormalised[0] else 0.0
    nearer = closing(here.renormalised, adapted.renormalised, clean.renormalised)
    return [
        f"The source model looks {float(clean.distance.mean()):.2f} px far on clean images, and {by_severity} px under "
        f"{corruption} of severity 1 to 5 (means of all blocks and heads). The last is a change of {grown.text('px')}.",
        f"At severity {severity} its profile lies {raw[0]:.2f} px from the clean one in a mean block, that of {method} "
        f"{raw[1]:.2f} px; with weights renormalised over the patches, {renormalised[0]:.2f} and {renormalised[1]:.2f} px.",
        _mechanical(profiles, here, adapted, method),
        f"That corruption lengthens the distance, as in the paper, {verdict(grown)}. That adaptation largely restores it "
        f"{_recovery(closed, nearer, adaptation)}: renormalised, {method} closes {_percent(closed)} of the gap to the clean "
        f"profile, {nearer.text('px')} ({outcome}).",
    ]


def _recovery(closed: float, nearer: Interval, adaptation: Adaptation) -> str:
    if not enough(nearer, adaptation):
        return TOO_FEW
    if not seen(nearer, adaptation) or closed < IN_PART:
        return "is not seen here"
    return "holds here" if closed >= LARGELY else "holds here in part"


def _mechanical(profiles: Mapping[str, Reach], here: Reach, adapted: Reach, method: str) -> str:
    """Return how much of the change is there only because an added key takes attention away."""
    raw, remains = (change(b, a) for a, b in _by_kind(here, adapted))
    said = f"{method} changes the mean distance by {raw.text('px')}, and renormalised by {remains.text('px')}"
    if not adapted.on_added.any():
        return said + "; it adds no keys that would take attention from the patches."
    said += f"; its added keys take {_percent(float(adapted.on_added.mean()))} of the attention"
    if raw.mean * remains.mean >= 0 and abs(raw.mean) > abs(remains.mean):
        share = _percent(remains.mean / raw.mean)
        said += f". So {share} of the change is in how patches look at patches; the rest is that share"
    before = profiles.get(_before(method))
    if before is not None:
        said += f". Before it learned anything, the change was {change(before.distance, here.distance).text('px')}"
    return said + "."


def _before(method: str) -> str:
    return f"{method} before its first step"


def _by_kind(*measured: Reach) -> list[tuple[Tensor, ...]]:
    """Return their distances, and their renormalised distances."""
    return [tuple(m.distance for m in measured), tuple(m.renormalised for m in measured)]


def _gap(values: Tensor, clean: Tensor) -> float:
    """Return the distance between two profiles: that of the block means, without its sign, in a mean block."""
    return float((values.mean((0, 2)) - clean.mean((0, 2))).abs().mean())


def closing(here: Tensor, adapted: Tensor, clean: Tensor) -> Interval:
    """Return how much nearer the adapted profile is to the clean one, in pixels, with an interval over images."""
    before, after = ((values - clean).mean(2).numpy() for values in (here, adapted))

    def nearer(weights: Floats) -> Floats:
        return np.abs(weights @ before).mean(1) - np.abs(weights @ after).mean(1)

    return bootstrap(nearer, len(before))


def change(values: Tensor, reference: Tensor) -> Interval:
    """Return the change of the mean over blocks and heads, with an interval over the images, which are the same in both."""
    return paired((values - reference).mean((1, 2)).numpy())


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f} %"


def _drawn(profiles: Mapping[str, Reach], after: str, before: str) -> Canvas:
    import matplotlib

    shades = matplotlib.colormaps["YlOrRd"](np.linspace(0.3, 0.95, len(SEVERITIES)))
    hues: dict[str, Any] = {CLEAN: INK, after: HUES[0], before: HUES[5]}
    hues |= {f"severity {s}": shade for s, shade in zip(SEVERITIES, shades)}
    adds = before in profiles
    canvas = new(9.6 if adds else 8.6, 5.2)
    axes = canvas.subplots(2, 3, sharex=True, width_ratios=(1, 1, 1 if adds else 0.55))
    kinds = (("distance", "raw"), ("renormalised", "renormalised"))
    for column, (kind, title) in enumerate(kinds):
        above, below = axes[:, column]
        above.set_title(f"Distance, {title}")
        below.set_title(f"Change from clean, {title}")
        clean = getattr(profiles[CLEAN], kind).mean((0, 2))
        for name, measured in profiles.items():
            values = getattr(measured, kind).mean(0)
            if name != before:
                _dots(above, values, hues[name], list(profiles).index(name) / len(profiles) - 0.5)
            _line(above, values.mean(1), hues[name], name, dashed=name == before)
            if name != CLEAN:
                _line(below, values.mean(1) - clean, hues[name], name, dashed=name == before)
        below.axhline(0, color=INK, linewidth=1)
        below.set_xlabel("block")
    _same_height(axes[0, :2])
    _same_height(axes[1, :2])
    axes[0, 0].set_ylabel("mean attention distance (pixels)")
    axes[1, 0].set_ylabel("difference (pixels)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    free = axes[1, 2]
    free.axis("off")
    free.legend(handles, labels, loc="center left")
    if adds:
        axes[0, 2].set_title("Attention on the added keys")
        axes[0, 2].set_ylabel("share of a patch's attention (%)")
        for name in (after, before):
            share = 100 * profiles[name].on_added.mean(0)
            _dots(axes[0, 2], share, hues[name], 0.2 if name == before else -0.2)
            _line(axes[0, 2], share.mean(1), hues[name], name, dashed=name == before)
        axes[0, 2].set_xlabel("block")
        axes[0, 2].tick_params(labelbottom=True)
    else:
        axes[0, 2].axis("off")
    return canvas


def _same_height(axes: Any) -> None:
    low, high = min(a.get_ylim()[0] for a in axes), max(a.get_ylim()[1] for a in axes)
    for a in axes:
        a.set_ylim(low, high)


def _dots(axes: Axes, values: Tensor, hue: Any, aside: float) -> None:
    """Draw a dot for each head; values are (blocks, heads). Those of different cases stand side by side."""
    blocks, heads = values.shape
    places = torch.arange(1, blocks + 1).repeat_interleave(heads) + 0.5 * aside
    axes.scatter(places, values.flatten(), s=5, color=hue, alpha=0.6, linewidth=0)


def _line(axes: Axes, values: Tensor, hue: Any, name: str, *, dashed: bool) -> None:
    blocks = torch.arange(1, len(values) + 1)
    axes.plot(blocks, values, color=hue, label=name, linewidth=1.4, linestyle=(0, (3, 2)) if dashed else "-")
    axes.set_xticks(blocks[:: max(1, len(values) // 12)])


def _caption(subject: Subject, corruption: str, method: str, severity: int, adds: bool) -> str:
    total = subject.count
    said = (
        f"Mean attention distance of every block of the model ({subject.testbed.name}): how many pixels lie between a patch "
        f"and what it looks at, weighted by attention, averaged over patches and {min(MEASURED, total)} images. Dots are "
        "heads, lines their means; below, differences from the line of the clean images. The class token is left out as "
        "query and as key. Left: weights as they are, the standard definition (the DCT paper sums over patches instead of "
        "taking the mean, which multiplies all values by the number of patches). Middle: the weights of each patch on all "
        f"patches are divided by their sum. Yellow to red: the source model under {corruption}. Blue: a copy that {method} "
        f"adapted in one pass over all {total} images at severity {severity}, then held still."
    )
    if adds:
        said += (
            " Right: what patches pay to the keys that the method adds. These take attention from the patches, so that the "
            "raw distance shrinks whether or not patches look elsewhere: only the middle tells. Dashed: the same model "
            "before its first step, when nothing was learned yet."
        )
    return said + (
        " Intervals are of 95 %, over images. A distance says nothing about which patches are looked at, nor whether the "
        "prediction is right."
    )


FIGURE = FigureKind(
    name="attention-distance",
    help="how far attention looks, block by block: clean, corrupted, adapted",
    position=10,
    draw=draw,
    draws=("attention-distance",),
    arguments=(METHOD, CORRUPTION, SEVERITY, SEED),
    clean=True,
)
