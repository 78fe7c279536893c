"""Replay of FOA with the recorded candidates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ...core.adapter import Adapter
from ...core.engine import Engine
from ...core.method import Setup
from ...core.statistics import source_statistics
from ...methods.foa import FOA
from ...models.view import ModelView
from . import Recording, Result, replays, run


@replays("FOA", of="foa")
def _foa(recording: Recording) -> Result:
    """Replay FOA with statistics computed from the recorded images, which must equal the recorded ones."""
    extra = recording.group("extra/")
    images = extra["source_images"]
    statistics = source_statistics(recording.model(), images, kinds=["class_tokens"], samples=len(images))
    drawn = (extra[f"candidates/{t}"] for t in range(len(recording.group("x/"))))
    costs: list[Tensor] = []

    class Recorded(FOA):
        def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
            adapted = super().attach(view, setup)
            self.best.data.copy_(extra["initial_prompts"][0])
            return adapted

        def draw(self, engine: Engine) -> Tensor:
            return next(drawn)

        def fitness(self, sums: Tensor, count: int) -> Tensor:
            costs.append(super().fitness(sums, count))
            return costs[-1]

    def observe(adapter: Adapter, logits: Tensor) -> dict[str, Any]:
        return {"fitness": costs[-1].tolist(), "best_candidate": int(costs[-1].argmin())}

    def final(adapter: Adapter) -> dict[str, Tensor]:
        method = adapter.method
        assert isinstance(method, FOA)
        return {"best_prompts": method.best.detach()[None], "shift_ema": method.average}

    tolerance = recording.tolerance_logits
    result = run(recording, Recorded, final, observe, trace_tolerance=tolerance, source_statistics=statistics)
    for name, values in statistics.of("class_tokens").items():
        result.compare(name, values, extra[f"source_{name}"], recording.tolerance_final)
    return result
