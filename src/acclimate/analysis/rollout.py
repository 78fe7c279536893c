"""Where the class token looks, picture by picture: on clean pictures, on corrupted ones, and after adaptation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from ..data.corruptions import Pixels
from ..errors import require_whole
from .attention import Layout, attention_maps, in_parts, rollout_maps
from .figures import SEQUENTIAL, Figure, drawing, new
from .scene import Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

CASES = ("source, clean", "source, corrupted", "adapted, corrupted", "adapted, clean")
ANOTHER = "another picture"
FINE = 224  # pixels of a drawn map, at least: a picture may have no more than 28
BLACK = 0.2  # share of black pixels from which on black is taken for the background


def draw(
    scene: Scene,
    corruption: str,
    method: str,
    *,
    rows: int,
    severity: int | None,
    seed: int,
    console: Console | None,
) -> Figure:
    """Attention rollout of the first pictures, and how alike clean and corrupted ones are over all pictures."""
    require_whole(1, rows=rows)
    severity = severity or scene.severity
    clean, corrupted = scene.batch(), scene.batch(corruption, severity)
    adapter = scene.adapted(method, corruption, severity, seed=seed, console=console)
    seen = zip((scene.source, scene.source, adapter, adapter), (clean, corrupted, corrupted, clean))
    maps = {case: rolled_out(*pair, case, console) for case, pair in zip(CASES, seen)}
    measured = measure(maps, scene.images.pixels)
    shown = min(rows, len(clean))
    with drawing():
        canvas = _drawn(scene, corrupted[:shown], {case: m[:shown] for case, m in maps.items()}, method)
    return Figure(
        name="rollout",
        title=f"Where the class token looks: {corruption}, and {method}",
        caption=_caption(scene, corruption, method, severity, shown),
        rows=[
            {"picture": int(number), **{name: float(values[i]) for name, values in measured.items()}}
            for i, number in enumerate(scene.images.numbers)
        ],
        canvas=canvas,
        findings=findings(measured, corruption, method, severity, scene.outcome(adapter, clean, corrupted)),
        protocol=scene.protocol(corruption, severity, adapter, seed),
    )


def rolled_out(model: nn.Module, images: Tensor, what: str, console: Console | None) -> Tensor:
    """The rollout of every picture, (pictures, rows, columns), in float64; its values sum to 1."""
    layout = Layout.of(model, images)
    parts = []
    for part in track(in_parts(model, images), f"rollout, {what}", console=console or Console(quiet=True), transient=True):
        parts.append(rollout_maps((attention for _, attention in attention_maps(model, part)), layout).double().cpu())
    maps = torch.cat(parts)
    return maps / maps.sum((1, 2), keepdim=True)  # what stays in the class token itself is left out


def measure(maps: Mapping[str, Tensor], pixels: Pixels) -> dict[str, Tensor]:
    """For every picture, how alike the maps are, and how much of them is on the object, if it stands before black."""
    clean = maps[CASES[0]]
    found = {f"correlation with clean: {case}": correlation(maps[case], clean) for case in CASES[1:]}
    found[f"correlation with clean: {ANOTHER}"] = correlation(clean.roll(1, 0), clean)
    black = torch.from_numpy((pixels == 0).all(-1))
    if black.float().mean() >= BLACK:
        shown = F.adaptive_avg_pool2d((~black).double()[:, None], (clean.shape[1], clean.shape[2]))[:, 0]
        found["object: share of the picture"] = shown.mean((1, 2))
        found |= {f"object: share of the rollout, {case}": (maps[case] * shown).sum((1, 2)) for case in CASES[:3]}
    return found


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's, of each map in `a` with its counterpart in `b`; 0 if one of them is flat."""
    a, b = (x.flatten(1) - x.flatten(1).mean(1, keepdim=True) for x in (a, b))
    return F.cosine_similarity(a, b, dim=1)


def findings(measured: Mapping[str, Tensor], corruption: str, method: str, severity: int, outcome: str) -> list[str]:
    """In sentences: what corruption changes, what adaptation gives back, and whether the object gets more."""
    names = (*CASES[1:], ANOTHER)
    source, adapted, control, other = (measured[f"correlation with clean: {name}"] for name in names)
    gain, error = _mean(adapted - source)
    regained = gain / (1 - _mean(source)[0])
    verdict = f"{100 * regained:+.1f} % of what corruption took" if abs(gain) > 2 * error else "no difference to speak of"
    said = [
        f"Over {len(source)} pictures, the rollout under {corruption} of severity {severity} correlates with the source "
        f"model's on the clean picture by {_mean(source)[0]:.3f} in the source model, and by {_mean(adapted)[0]:.3f} after "
        f"{method}: {gain:+.3f} ± {error:.3f} (one standard error), {verdict} ({outcome}).",
        f"For comparison: two different clean pictures correlate by {_mean(other)[0]:.3f}, the adapted model on the clean "
        f"picture itself by {_mean(control)[0]:.3f}.",
    ]
    if "object: share of the picture" in measured:
        area, *shares = (measured[f"object: {name}"] for name in _object_names())
        gain, error = _mean(shares[2] - shares[1])
        clean, corrupted, after = (f"{100 * _mean(share)[0]:.1f} %" for share in shares)
        holds = "holds" if gain > 2 * error else "is not seen"
        said.append(
            f"The object, all that is not black in the clean picture, is {100 * _mean(area)[0]:.1f} % of the picture. The "
            f"source model gives it {clean} of the rollout, {corrupted} once corrupted, and {after} after {method} "
            f"({100 * gain:+.2f} ± {100 * error:.2f} points). That the adapted model looks more at the object, which the "
            f"paper concludes from examples, {holds} here."
        )
    return said


def _object_names() -> list[str]:
    return ["share of the picture", *(f"share of the rollout, {case}" for case in CASES[:3])]


def _mean(values: Tensor) -> tuple[float, float]:
    """And its standard error."""
    return float(values.mean()), float(values.std() / len(values) ** 0.5) if len(values) > 1 else float("inf")


def _drawn(scene: Scene, corrupted: Tensor, maps: Mapping[str, Tensor], method: str) -> Canvas:
    """One row for each picture. The maps of a row share one scale, on which 1 is an even look at all patches."""
    count = len(corrupted)
    pictures = {"clean": scene.images.pixels[:count], "corrupted": _pixels(scene, corrupted)}
    columns: list[tuple[str, Pixels, Tensor | None]] = [
        ("clean\n", pictures["clean"], None),
        ("rollout of\nsource", pictures["clean"], maps[CASES[0]]),
        ("corrupted\n", pictures["corrupted"], None),
        ("rollout of\nsource", pictures["corrupted"], maps[CASES[1]]),
        (f"rollout\nafter {method}", pictures["corrupted"], maps[CASES[2]]),
    ]
    even = maps[CASES[0]][0].numel()
    canvas = new(6.2, 1.18 * count + 0.95)
    axes = canvas.subplots(count, len(columns), squeeze=False)
    highest = [max(float(maps[case][row].max()) * even for case in CASES[:3]) for row in range(count)]
    for row in range(count):
        for column, (title, shown, rolled) in enumerate(columns):
            place = axes[row, column]
            place.axis("off")
            if row == 0:
                place.set_title(title, loc="center")
            drawn: Any = shown[row]
            if rolled is not None:
                drawn = overlay(drawn, even * rolled[row] / highest[row])
            place.imshow(drawn, interpolation="nearest")
    _scale(canvas, axes)
    return canvas


def overlay(picture: Pixels, level: Tensor) -> np.ndarray[Any, Any]:
    """A map with values from 0 to 1, smoothly enlarged, as colour over the grey picture."""
    import matplotlib

    factor = max(1, -(-FINE // min(picture.shape[:2])))
    size = (factor * picture.shape[0], factor * picture.shape[1])
    smooth = F.interpolate(level[None, None], size, mode="bilinear", align_corners=False)[0, 0].clamp(0, 1)
    grey = np.kron(picture.mean(-1) / 255, np.ones((factor, factor)))[..., None]
    colour = matplotlib.colormaps[SEQUENTIAL](smooth.numpy())[..., :3]
    return (0.7 * colour + 0.3 * grey).clip(0, 1)


def _pixels(scene: Scene, images: Tensor) -> Pixels:
    """What the model takes, as it looks."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (scene.mean, scene.std))
    return ((images.cpu() * std + mean).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()


def _scale(canvas: Canvas, axes: Any) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    levels = ScalarMappable(Normalize(0, 1), SEQUENTIAL)
    bar = canvas.colorbar(levels, ax=axes, location="bottom", shrink=0.45, aspect=40, pad=0.02)
    bar.set_ticks([0, 1], labels=["0", "most in the row"])
    bar.set_label("rollout of the class token")
    bar.outline.set_visible(False)


def _caption(scene: Scene, corruption: str, method: str, severity: int, shown: int) -> str:
    return (
        f"Attention rollout of the model ({scene.name}): how much of each patch arrives in the class token behind the last "
        "block, if attention weights are multiplied from block to block (the mean of the heads, half of it replaced by the "
        f"identity for the residual connection). The first {shown} of {len(scene.images.labels)} pictures, not chosen. From "
        f"left: clean; the source model's rollout; under {corruption} of severity {severity}; the source model's rollout of "
        f"that; and the rollout of a copy that {method} adapted in one pass over all pictures under this corruption, then "
        "held still. A map has one value for each patch and is smoothly enlarged; the maps of a row share one colour scale. "
        "Keys that a method adds are left out, and the weights of the others scaled to sum to 1. Rollout ignores values, "
        "norms and what lies between the attentions: it shows where information can come from, not what the prediction "
        "rests on."
    )
