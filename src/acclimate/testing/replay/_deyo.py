"""Replay of DeYO, whose patches are shuffled in the recorded order."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.engine import Engine
from ...methods.deyo import DeYO, shuffle
from . import Recording, Result, replays, run


@replays("DeYO")
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
