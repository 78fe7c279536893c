"""Replay of REM, with the patches of its views."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.adapter import Adapter
from ...core.engine import entropy
from ...methods.rem import REM
from . import Recording, Result, adapted_parameters, replays, run


@replays("REM", of="rem")
def _rem(recording: Recording) -> Result:
    seen: dict[str, list[Any]] = {}

    class Noting(REM):
        """REM that stores the patches and the entropies of all views, of a whole batch."""

        def kept(self, order: Tensor) -> list[Tensor]:
            kept = super().kept(order)
            seen["kept"] = [torch.zeros_like(order).scatter(1, patches, 1).tolist() for patches in kept]
            return kept

        def ranked(self, *views: Tensor) -> tuple[Tensor, Tensor]:
            seen["entropy"] = [entropy(view).tolist() for view in views]
            return super().ranked(*views)

    def final(adapter: Adapter) -> dict[str, Tensor]:
        return {name: p for name, p in adapted_parameters(adapter).items() if not name.startswith("momentum.")}

    def observe(adapter: Adapter, logits: Tensor) -> dict[str, Any]:
        return dict(seen)

    whole = len(recording.tensors["x/0"])
    return run(recording, Noting, final, observe, trace_tolerance=recording.tolerance_logits, micro_batch=whole)
