"""Where the class token looks, image by image: on clean images, on corrupted ones, and after adaptation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.corruptions import Pixels
from ..errors import require_whole
from .attention import Layout, attention_maps, in_parts, rollout_maps
from .figures import SEQUENTIAL, Figure, drawing, new
from .intervals import Adaptation, Interval, enough, paired, seen, verdict
from .registry import CORRUPTION, METHOD, SEED, SEVERITY, Argument, FigureKind
from .subject import BATCH, Subject, worded

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

CASES = ("source, clean", "source, corrupted", "adapted, corrupted", "adapted, clean")
ANOTHER = "another image"
FINE = 224  # pixels of a drawn map, at least: an image may have no more than 28
BLACK = 0.2  # share of black pixels from which on black is taken for the background
NOTABLE = 0.1  # share of what corruption took, below which a gain is called small


def draw(
    subject: Subject,
    *,
    corruption: str = "defocus_blur",
    method: str = "dct",
    rows: int = 6,
    severity: int | None = None,
    seed: int = 0,
) -> list[Figure]:
    """Draw the attention rollout of the first images, and measure how alike clean and corrupted ones are over all images."""
    require_whole(1, rows=rows)
    severity = subject.severity(severity)
    clean, corrupted = subject.batch(), subject.batch(corruption, severity)
    adapter = subject.adapted(method, [subject.domain(corruption, severity)], seed=seed)
    pairs = zip((subject.model, subject.model, adapter, adapter), (clean, corrupted, corrupted, clean))
    maps = {case: rolled_out(*pair) for case, pair in subject.track([*zip(CASES, pairs)], "rollout")}
    measured = measure(maps, subject.pixels(clean))
    shown = min(rows, len(clean))
    with drawing():
        first = {case: m[:shown] for case, m in maps.items()}
        canvas = _drawn(subject.pixels(clean[:shown]), subject.pixels(corrupted[:shown]), first, method)
    outcome = subject.agreement(adapter, clean, corrupted)
    figure = Figure(
        name="rollout",
        title=f"Where the class token looks: {corruption}, and {method}",
        caption=_caption(subject, corruption, method, severity, shown),
        rows=[{"image": i, **{name: float(values[i]) for name, values in measured.items()}} for i in range(subject.count)],
        canvas=canvas,
        findings=findings(measured, corruption, method, severity, Adaptation.of(adapter), outcome),
        protocol=subject.protocol(
            corruption=f"{corruption}, severity {severity}",
            method=worded(adapter),
            stream=f"one pass in batches of {BATCH}, in random order",
            seed=str(seed),
        ),
        origin=subject.origin,
    )
    return [figure]


def rolled_out(model: nn.Module, images: Tensor) -> Tensor:
    """Return the rollout of every image, (images, rows, columns), in float64; its values sum to 1."""
    layout = Layout.of(model, images)
    parts = []
    for part in in_parts(model, images):
        parts.append(rollout_maps((attention for _, attention in attention_maps(model, part)), layout).double().cpu())
    maps = torch.cat(parts)
    return maps / maps.sum((1, 2), keepdim=True)  # what stays in the class token itself is left out


def measure(maps: Mapping[str, Tensor], pixels: Pixels) -> dict[str, Tensor]:
    """Return for every image how alike the maps are, and how much of them is on the object, if it stands before black."""
    clean = maps[CASES[0]]
    found = {f"correlation with clean: {case}": correlation(maps[case], clean) for case in CASES[1:]}
    found[f"correlation with clean: {ANOTHER}"] = correlation(clean.roll(1, 0), clean)
    black = torch.from_numpy((pixels == 0).all(-1))
    if black.float().mean() >= BLACK:
        shown = F.adaptive_avg_pool2d((~black).double()[:, None], (clean.shape[1], clean.shape[2]))[:, 0]
        found["object: share of the image"] = shown.mean((1, 2))
        found |= {f"object: share of the rollout, {case}": (maps[case] * shown).sum((1, 2)) for case in CASES[:3]}
    return found


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return Pearson's correlation of each map in `a` with its counterpart in `b`; 0 if one of them is flat."""
    a, b = (x.flatten(1) - x.flatten(1).mean(1, keepdim=True) for x in (a, b))
    return F.cosine_similarity(a, b, dim=1)


def findings(
    measured: Mapping[str, Tensor], corruption: str, method: str, severity: int, adaptation: Adaptation, outcome: str
) -> list[str]:
    """Return in sentences what corruption changes, what adaptation gives back, and whether the object gets more."""
    names = (*CASES[1:], ANOTHER)
    source, adapted, control, other = (measured[f"correlation with clean: {name}"] for name in names)
    gain = paired(adapted - source)
    if not enough(gain, adaptation):
        meaning = "too few images or steps to say whether it is more than chance"
    elif seen(gain, adaptation):
        meaning = f"{100 * gain.mean / (1 - float(source.mean())):+.1f} % of what corruption took"
    else:
        meaning = "a difference is not seen"
    said = [
        f"Over {len(source)} images, the rollout under {corruption} of severity {severity} correlates with the source "
        f"model's on the clean image by {source.mean():.3f} in the source model, and by {adapted.mean():.3f} after "
        f"{method}: {gain.text('', 3)}, {meaning} ({outcome}).",
        f"For comparison: two different clean images correlate by {other.mean():.3f}, the adapted model on the clean "
        f"image itself by {control.mean():.3f}.",
    ]
    if "object: share of the image" in measured:
        area = measured["object: share of the image"]
        shares = [measured[f"object: share of the rollout, {case}"] for case in CASES[:3]]
        more = paired(shares[2] - shares[1])
        lost = float((shares[0] - shares[1]).mean())
        regained = more.mean / lost if lost > 0 else None
        part = "" if regained is None else f", {100 * regained:.1f} % of what corruption took"
        clean, corrupted, after = (f"{100 * share.mean():.1f} %" for share in shares)
        said.append(
            f"The object, all that is not black in the clean image, is {100 * area.mean():.1f} % of the image. The "
            f"source model gives it {clean} of the rollout, {corrupted} once corrupted, and {after} after {method}: "
            f"{more.text('points', 2, 100)}{part}. That the adapted model looks more at the object, which the paper "
            f"concludes from examples, {_judged(more, regained, adaptation)}."
        )
    return said


def _judged(more: Interval, regained: float | None, adaptation: Adaptation) -> str:
    if seen(more, adaptation) and more.mean > 0 and regained is not None and regained < NOTABLE:
        return "is hardly seen here: the difference is certain, and small"
    return verdict(more, adaptation)


def _drawn(clean: Pixels, corrupted: Pixels, maps: Mapping[str, Tensor], method: str) -> Canvas:
    """Draw one row for each image. The maps of a row share one scale."""
    count = len(clean)
    columns: list[tuple[str, Pixels, Tensor | None]] = [
        ("clean\n", clean, None),
        ("rollout of\nsource", clean, maps[CASES[0]]),
        ("corrupted\n", corrupted, None),
        ("rollout of\nsource", corrupted, maps[CASES[1]]),
        (f"rollout\nafter {method}", corrupted, maps[CASES[2]]),
    ]
    canvas = new(6.2, 1.18 * count + 0.95)
    axes = canvas.subplots(count, len(columns), squeeze=False)
    highest = [max(float(maps[case][row].max()) for case in CASES[:3]) for row in range(count)]
    for row in range(count):
        for column, (title, shown, rolled) in enumerate(columns):
            place = axes[row, column]
            place.axis("off")
            if row == 0:
                place.set_title(title, loc="center")
            drawn: Any = shown[row]
            if rolled is not None:
                drawn = overlay(drawn, rolled[row] / highest[row])
            place.imshow(drawn, interpolation="nearest")
    _scale(canvas, axes)
    return canvas


def overlay(image: Pixels, level: Tensor) -> np.ndarray[Any, Any]:
    """Return a map with values from 0 to 1, smoothly enlarged, as colour over the grey image."""
    import matplotlib

    factor = max(1, -(-FINE // min(image.shape[:2])))
    size = (factor * image.shape[0], factor * image.shape[1])
    smooth = F.interpolate(level[None, None], size, mode="bilinear", align_corners=False)[0, 0].clamp(0, 1)
    grey = np.kron(image.mean(-1) / 255, np.ones((factor, factor)))[..., None]
    colour = matplotlib.colormaps[SEQUENTIAL](smooth.numpy())[..., :3]
    return (0.7 * colour + 0.3 * grey).clip(0, 1)


def _scale(canvas: Canvas, axes: Any) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    levels = ScalarMappable(Normalize(0, 1), SEQUENTIAL)
    bar = canvas.colorbar(levels, ax=axes, location="bottom", shrink=0.45, aspect=40, pad=0.02)
    bar.set_ticks([0, 1], labels=["0", "most in the row"])
    bar.set_label("rollout of the class token")
    bar.outline.set_visible(False)


def _caption(subject: Subject, corruption: str, method: str, severity: int, shown: int) -> str:
    return (
        f"Attention rollout of the model ({subject.testbed.name}): how much of each patch arrives in the class token behind "
        "the last block, if attention weights are multiplied from block to block (the mean of the heads, half of it "
        f"replaced by the identity for the residual connection). The first {shown} of {subject.count} images, not chosen. "
        f"From left: clean; the source model's rollout; under {corruption} of severity {severity}; the source model's "
        f"rollout of that; and the rollout of a copy that {method} adapted in one pass over all images under this "
        "corruption, then held still. A map has one value for each patch and is smoothly enlarged; the maps of a row share "
        "one colour scale. Keys that a method adds are left out, and the weights of the others scaled to sum to 1. "
        "Intervals are of 95 %, of paired differences over images. Rollout ignores values, norms and what lies between the "
        "attentions: it shows where information can come from, not what the prediction rests on."
    )


FIGURE = FigureKind(
    name="rollout",
    help="where the class token looks: clean, corrupted, adapted",
    position=20,
    draw=draw,
    draws=("rollout",),
    arguments=(METHOD, CORRUPTION, SEVERITY, SEED, Argument("rows", "how many images are shown", 6, int, "N", (1, 1000))),
    clean=True,
)
