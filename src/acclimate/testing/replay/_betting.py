"""Replay of POEM, with its bets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.adapter import Adapter
from ...core.method import Setup
from ...core.statistics import constants, source_statistics
from ...methods.poem import POEM
from ...models.view import ModelView
from . import Recording, Result, adapted_parameters, replays, run

TOLERANCE = 1e-4  # of bets and losses; the recordings suggest it
STEEP = 1e-3  # of targets, and relative of the wealth


@replays("POEM", of="poem")
def _poem(recording: Recording) -> Result:
    """Replay POEM with the recorded entropies of source images, which must equal those of our statistics."""
    recorded, images = (recording.tensors[f"extra/{name}"] for name in ("source_entropies", "source_images"))
    statistics = source_statistics(recording.model(), images, kinds=["logits"], samples=len(images))
    rows: list[dict[str, float]] = []

    class Noting(POEM):
        """POEM that stores every bet."""

        def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
            adapted = super().attach(view, setup)
            computed.extend(self.source_entropies)
            self.source_entropies = constants([recorded], view)  # whose ties our rounding may break
            return adapted

        def targets(self, entropies: Tensor) -> Tensor:
            rows.clear()
            targets = super().targets(entropies)
            for row, h, target in zip(rows, entropies.tolist(), targets.tolist()):
                row |= {"entropy": h, "target": target}
            return targets

        def bend(self, places: Sequence[float]) -> list[float]:
            bent: list[float] = []
            for u in places:
                used = float(self.bet)
                bent += super().bend([u])
                row = {"u": u, "u_protected": bent[-1], "epsilon_used": used, "epsilon_next": float(self.bet)}
                rows.append({**row, "wealth": math.exp(float(self.log_wealth))})
            return bent

    computed: list[Tensor] = []
    series: dict[str, list[list[float]]] = {}

    def observe(adapter: Adapter, logits: Tensor) -> dict[str, Any]:
        size = len(recording.tensors["x/0"])
        for name in rows[0]:
            values = [row[name] for row in rows]
            series.setdefault(name, []).append(values + [math.nan] * (size - len(values)))
        return {"n_selected": adapter.record.used if adapter.record else 0}

    def final(adapter: Adapter) -> dict[str, Tensor]:
        method = adapter.method
        assert isinstance(method, POEM)
        return {
            **adapted_parameters(adapter),
            "protector.epsilon": method.bet,
            "protector.gradient_count": method.seen - 1,
            "protector.gradient_square_sum": method.squares,
            "samples_seen": method.seen,
        }

    result = run(recording, Noting, final, observe, trace_tolerance=TOLERANCE, source_statistics=statistics)
    result.compare("source entropies", computed[0], recorded, recording.tolerance_logits)
    for name, values in series.items():
        ours, expected = torch.tensor(values, dtype=torch.float64), recording.tensors[f"trace/{name}"].double()
        if name == "wealth":
            ours, expected = ours / expected, expected / expected
        result.compare(f"trace {name}", ours, expected, STEEP if name in ("target", "wealth") else TOLERANCE)
    return result
