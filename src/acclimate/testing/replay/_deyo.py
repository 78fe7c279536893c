"""Replays of DeYO and ReCAP, whose patches are shuffled in the recorded order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.adapter import Adapter
from ...core.engine import Engine
from ...core.statistics import source_statistics
from ...methods.deyo import DeYO, shuffle
from ...methods.recap import MOST, SCALE, ReCAP
from . import Recording, Result, replays, run


@replays("DeYO", of="deyo")
def _deyo(recording: Recording) -> Result:
    hyper, extra = recording.hyper, recording.group("extra/")
    hyper["weight_margin"] = hyper.pop("margin_e0")
    hyper["margin_e0"] = hyper.pop("deyo_margin")  # the margin of the filter, named as in other recordings
    stored = (extra[f"permutation/{t}"] for t in range(len(recording.group("x/"))))

    class Recorded(DeYO):
        def orders(self, images: Tensor, engine: Engine) -> Tensor:
            return next(stored)

    result = run(recording, Recorded)
    for t, images, _ in recording.batches():
        if not torch.equal(shuffle(images, extra[f"permutation/{t}"], hyper["patch_len"]), extra[f"shuffled/{t}"]):
            result.problems.append(f"shuffled images of step {t} differ")
    return result


@replays("ReCAP", of="recap")
def _recap(recording: Recording) -> Result:
    """Replay ReCAP with the recorded variance of the source features."""
    extra, hyper = recording.group("extra/"), recording.hyper
    if "scale" in hyper:
        hyper["tau"] *= SCALE / hyper.pop("scale")
    variants = {"recap": "plain", "recap+plpd": "plpd", "recap, no filter and no weights": "tent"}
    statistics = source_statistics(recording.model(), recording.tensors["x/0"], kinds=["class_tokens"])
    spread = statistics.tensors["class_tokens/std"].clone()
    spread[-len(extra["sigma"]) :] = extra["sigma"].sqrt()
    statistics = replace(statistics, tensors={**statistics.tensors, "class_tokens/std": spread})
    stored = (extra[f"permutation/{t}"] for t in range(len(recording.group("x/"))))

    class Recorded(ReCAP):
        def orders(self, images: Tensor, engine: Engine) -> Tensor:
            return next(stored)

    def observe(adapter: Adapter, logits: Tensor) -> dict[str, Any]:
        method = adapter.method
        assert isinstance(method, ReCAP)
        h, instability = method.regional(logits, method.region[0].double().clamp(max=MOST).exp())
        count = int((h < hyper.get("margin", float("inf"))).sum())
        missing = [float("nan")] * (len(recording.tensors["x/0"]) - len(h))  # the last batch may be short
        return {
            "regional_entropy": h.tolist() + missing,
            "regional_instability": instability.tolist() + missing,
            "n_selected_1": count,
        }

    variant = variants[hyper["form"]]
    tolerance = recording.tolerance_logits
    return run(
        recording, Recorded, observe=observe, trace_tolerance=tolerance, variant=variant, source_statistics=statistics
    )
