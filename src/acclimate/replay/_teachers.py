"""Methods with a teacher or with augmented views, which are looked up instead of drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..adapter import Adapter
from ..engine import Engine
from ..methods.cotta import CoTTA
from ..methods.memo import MEMO
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


@replays("MEMO")
def _memo(recording: Recording) -> Result:
    class Recorded(MEMO):
        """MEMO with the recorded views."""

        augments = False
        calls = -1

        def augmented(self, image: Tensor, engine: Engine) -> Tensor:
            self.calls += 1
            return recording.tensors[f"extra/views/{self.calls}"]

    return run(recording, Recorded, lambda adapter: _determined(adapter, recording), trace_tolerance=1e-4)


def _determined(adapter: Adapter, recording: Recording) -> dict[str, Tensor]:
    """The parameters, with the recorded values where the update has no determined direction.

    AdamW divides by the size of the gradient, so an element whose true gradient is zero moves by the sign of a rounding
    error: that of every key's bias, on which softmax does not depend, and single ones elsewhere.
    """
    final = {name: p.clone() for name, p in _all_parameters(adapter).items()}
    beyond = 0
    for name, recorded in recording.group("final/").items():
        ours = final[name]
        if name.endswith("attn.qkv.bias"):
            ours.chunk(3)[1].copy_(recorded.chunk(3)[1])
        off = (ours - recorded).abs()
        free = (off > recording.tolerance_final) & (off <= 2 * recording.hyper["lr"])
        beyond += int(free.sum())
        ours[free] = recorded[free]
    total = sum(p.numel() for p in final.values())
    if beyond > total * 1e-3:
        raise ValueError(f"{beyond} of {total} parameters are off, which are more than single ones")
    return final
