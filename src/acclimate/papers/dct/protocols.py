"""Whose protocol is this? The accuracy of the source model tells.

Several "ViT-B/16 on ImageNet-C" are in print, which differ in their weights and in how images are normalised. Results
are comparable only where the Source accuracies agree. Accuracies are in per cent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from ...data.corruptions import CORRUPTIONS
from ...errors import require_between, require_whole
from ...evaluation.tables import Grid, Summary
from .reported import reported

MATCH = 0.5  # points within which two evaluations of one protocol agree: decoding, resizing and rounding differ
NEAR = 2.0  # points beyond which it is something else
ERRORS = 2  # standard errors that a sample may be off besides
VIT_B = "vit_base_patch16_224.augreg_in21k_ft_in1k"
VIT_B_2 = "vit_base_patch16_224.augreg2_in21k_ft_in1k"
VIT_L = "vit_large_patch16_224.augreg_in21k_ft_in1k"


@dataclass(frozen=True)
class KnownSource:
    """Holds a Source accuracy in print, and the protocol it belongs to."""

    model: str
    data: str
    severity: int | None
    mean: float
    per_column: Mapping[str, float] | None
    protocol: str
    wrong: bool  # the images are not normalised as the model was trained
    where: str

    def __str__(self) -> str:
        return f"{self.model}, {self.protocol} (Source {self.mean} %, {self.where})"


@dataclass(frozen=True)
class ProtocolMatch:
    """Says which protocol in print a Source accuracy resembles."""

    nearest: KnownSource | None
    distance: float | None  # points; root mean square over the columns where both are known, else between the means
    verdict: str
    warning: str | None
    also: tuple[KnownSource, ...] = ()  # others that the sample is too small to exclude


@cache
def known_sources() -> tuple[KnownSource, ...]:
    """Return all Source accuracies whose protocol is known; Office-Home's is not: its fine-tuning is not described."""
    paper, matched = "Tang et al. 2024", "mean and std 0.5"
    doebler = "60.2 % error, mariodoebler/test-time-adaptation"
    foreign = "ImageNet's mean and std, wrong for these weights"

    def source(table: str) -> dict[str, float]:
        return reported(table).row("source")

    return (
        KnownSource(VIT_B, "imagenet-c", 5, 51.0, source("normal"), matched, False, paper),
        KnownSource(VIT_B, "imagenet-c", 5, 29.9, None, foreign, True, "README of SAR, label shift"),
        KnownSource(VIT_B_2, "imagenet-c", 5, 55.5, None, matched, False, "FOA and SPA; newer timm's without a tag"),
        KnownSource("torchvision's ViT-B/16", "imagenet-c", 5, 39.8, None, "as its benchmark feeds it", False, doebler),
        KnownSource(VIT_L, "imagenet-c", 5, 60.9, source("vit-l-normal"), matched, False, paper),
        KnownSource(VIT_B, "imagenet-c", 3, 69.2, source("normal-3"), matched, False, paper),
        KnownSource(VIT_B, "imagenet-c", 3, 53.8, source("bs1-3"), foreign, True, f"{paper}, inferred"),
        KnownSource(VIT_B, "imagenet-r", None, 57.2, None, f"{matched}, 200 classes", False, paper),
        KnownSource(VIT_B, "visda-2021", None, 57.7, None, f"{matched}, 1000 classes", False, paper),
    )


def match_protocol(
    mean: float,
    per_column: Mapping[str, float] | None = None,
    *,
    data: str,
    severity: int | None,
    samples: int | None = None,
) -> ProtocolMatch:
    """Return the protocol in print that a Source accuracy resembles most.

    Args:
        mean: Source accuracy, mean over the corruptions where there are several.
        per_column: The same for each corruption, if at hand: means alone can coincide. Some of them are enough.
        data: "imagenet-c", "imagenet-r" or "visda-2021"; with other data the answer is that nothing is comparable.
        severity: Of the corruptions; None where there are none.
        samples: Images behind each column, if not all of the data set's: the fewer, the more it may be off.
    """
    columns = per_column or {}
    for accuracy in (mean, *columns.values()):
        require_between(0, 100, accuracy=accuracy)
    if samples is not None:
        require_whole(1, samples=samples)
    case = data if severity is None else f"{data} at severity {severity}"
    candidates = [each for each in known_sources() if (each.data, each.severity) == (data, severity)]
    if not candidates:
        return ProtocolMatch(None, None, f"not comparable: no Source accuracy on {case} with a known protocol", None)
    compared = [c for each in candidates if (c := _compare(each, mean, columns, samples)) is not None]
    if not compared:
        return ProtocolMatch(None, None, f"not comparable: no Source accuracy on {case} is known for these columns", None)
    best, *rest = sorted(compared, key=lambda c: (c.excess, c.distance))
    also = tuple(c.known for c in rest if c.within(MATCH)) if best.within(MATCH) else ()
    warning = _warning(best.known) if best.known.wrong and best.within(NEAR) else None
    return ProtocolMatch(best.known, best.distance, _verdict(best, also, samples), warning, also)


def match_source(grid: Grid) -> ProtocolMatch | None:
    """Return the protocol in print that the Source row of a table resembles; None without such a row."""
    cell = grid.source and grid.cell(grid.source, Summary.MEAN)
    if grid.source is None or cell is None:
        return None
    spec = grid.runs[grid.source][0].spec
    severity = grid.severities[0] if len(grid.severities) == 1 else None
    columns = {key.name: found.accuracy for key in grid.domains if (found := grid.cell(grid.source, key))}
    return match_protocol(cell.accuracy, columns, data=spec.dataset, severity=severity, samples=spec.images[0])


def source_remarks(grid: Grid) -> list[str]:
    """Return what there is to say about the protocol of a table, in sentences; nothing where none in print compares."""
    match = match_source(grid)
    if match is None or match.nearest is None:
        return []
    return [f"Source {match.verdict}.", *([f"Warning: {match.warning}"] if match.warning else [])]


@dataclass(frozen=True)
class _Comparison:
    known: KnownSource
    distance: float
    error: float  # standard error of a column's accuracy

    @property
    def excess(self) -> float:
        """Distance beyond what a sample of this size has by chance."""
        return math.sqrt(max(0.0, self.distance**2 - self.error**2))

    def within(self, points: float) -> bool:
        return self.excess <= points + ERRORS * self.error


def _compare(known: KnownSource, mean: float, columns: Mapping[str, float], samples: int | None) -> _Comparison | None:
    if columns and known.data == "imagenet-c":
        whole = all(name in columns for name in CORRUPTIONS)
        if known.per_column is None and not whole:
            return None  # its mean is over all corruptions
        if whole:
            mean = fmean(columns[name] for name in CORRUPTIONS)
    pairs = [(columns[name], value) for name, value in (known.per_column or {}).items() if name in columns]
    if columns and known.per_column and not pairs:
        return None
    pairs = pairs or [(mean, known.mean)]
    distance = math.sqrt(fmean((mine - theirs) ** 2 for mine, theirs in pairs))
    variance = fmean(theirs * (100 - theirs) for _, theirs in pairs)
    return _Comparison(known, distance, math.sqrt(variance / samples) if samples else 0.0)


def _verdict(best: _Comparison, also: tuple[KnownSource, ...], samples: int | None) -> str:
    off = f"{best.distance:.1f} points off"
    if not best.within(NEAR):
        return f"unlike any known protocol: the nearest is {best.known}, {off}"
    if not best.within(MATCH):
        return f"near {best.known} ({off})"
    unsure = f"; {samples} images do not exclude {'; '.join(map(str, also))}" if also else ""
    return f"matches {best.known}{unsure}"


def _warning(known: KnownSource) -> str:
    return (
        f"This looks like {known.model} with images normalised by ImageNet's mean and std, with which it was not trained: "
        "take mean and std from the model's own timm configuration (timm.data.resolve_model_data_config), 0.5 and 0.5."
    )
