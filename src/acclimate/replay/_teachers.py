"""Methods with a teacher or with augmented views, which are looked up instead of drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..adapter import Adapter
from ..engine import Engine
from ..methods.cotta import CoTTA
from . import Recording, Result, replays, run


def _all_parameters(adapter: Adapter, prefix: str = "") -> dict[str, Tensor]:
    """The model's parameters, those that do not adapt included, under timm's names."""
    return {prefix + name: p.detach() for name, p in adapter._source_state.items()}


def _teacher(adapter: Adapter, prefix: str) -> dict[str, Tensor]:
    method: Any = adapter.method
    names = [prefix + name.removeprefix("model/") for name in adapter.engine.named]
    return dict(zip(names, method.teacher.weights))


@replays("CoTTA")
def _cotta(recording: Recording) -> Result:
    confidence = recording.tensors["trace/anchor_confidence"]

    class Recorded(CoTTA):
        """CoTTA with the recorded views, which are of images as the model takes them, and the recorded restored elements."""

        augments = False
        calls = -1
        shown = 0

        def source_is_unsure(self, images: Tensor, engine: Engine) -> bool:
            self.calls += 1
            self.shown = 0
            unsure = super().source_is_unsure(images, engine)
            if unsure != bool(confidence[self.calls] < self.threshold):
                raise ValueError(f"another choice between views and none at step {self.calls}")
            return unsure

        def view(self, images: Tensor, engine: Engine, places: Tensor, total: int) -> Tensor:
            self.shown += 1
            return recording.tensors[f"extra/aug/{self.calls}/{self.shown - 1}"]

        def restored(self, i: int, p: Tensor, engine: Engine) -> Tensor:
            name = list(engine.named)[i].removeprefix("model/")
            mask = recording.tensors.get(f"extra/restore_mask/{self.calls}/{name}")
            if mask is None and self.restore:
                raise ValueError(f"no restored elements of {name} are recorded for step {self.calls}")
            return torch.zeros(0, dtype=torch.long) if mask is None else mask.flatten().nonzero()[:, 0]

    def final(adapter: Adapter) -> dict[str, Tensor]:
        plain = _all_parameters(adapter, "teacher.")
        return {**_all_parameters(adapter, "student."), **plain, **_teacher(adapter, "teacher.")}

    return run(recording, Recorded, final)
