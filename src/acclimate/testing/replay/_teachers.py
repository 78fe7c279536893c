"""Replays of methods with a teacher or augmented views, with the recorded views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.adapter import Adapter
from ...core.engine import Engine
from ...core.method import Setup, Step
from ...methods.adacontrast import AdaContrast
from ...methods.cmf import CMF
from ...methods.cotta import CoTTA
from ...methods.memo import MEMO
from ...methods.roid import ROID
from ...methods.rotta import EMPTY, RoTTA
from ...models.view import ModelView
from . import TRACE_TOLERANCE, Recording, Result, adapted_parameters, replays, run


def _all_parameters(adapter: Adapter, prefix: str = "") -> dict[str, Tensor]:
    """Return all parameters of the model, adapted or not, by their names in timm."""
    return {prefix + name: p.detach() for name, p in adapter._wrapped.weights.items()}


def _averaged(adapter: Adapter, prefix: str, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return averages of the adapted parameters."""
    return dict(zip([prefix + name.removeprefix("model/") for name in adapter.engine.adapted.named], weights))


@replays("CoTTA", of="cotta")
def _cotta(recording: Recording) -> Result:
    confidence = recording.tensors["trace/anchor_confidence"]

    class Recorded(CoTTA):
        """CoTTA with the recorded views, which are normalised images, and the recorded restored elements."""

        calls = -1
        shown = 0

        def source_is_unsure(self, images: Tensor, engine: Engine) -> bool:
            self.calls += 1
            self.shown = 0
            unsure = super().source_is_unsure(images, engine)
            if unsure != bool(confidence[self.calls] < self.threshold):
                raise ValueError(f"another choice between views and none at step {self.calls}")
            return unsure

        def view(self, images: Tensor, engine: Engine, positions: Tensor, total: int) -> Tensor:
            self.shown += 1
            return recording.tensors[f"extra/aug/{self.calls}/{self.shown - 1}"]

        def restored(self, i: int, p: Tensor, engine: Engine) -> Tensor:
            name = list(engine.adapted.named)[i].removeprefix("model/")
            mask = recording.tensors.get(f"extra/restore_mask/{self.calls}/{name}")
            if mask is None and self.restore:
                raise ValueError(f"no restored elements of {name} are recorded for step {self.calls}")
            return torch.zeros(0, dtype=torch.long) if mask is None else mask.flatten().nonzero()[:, 0]

    def final(adapter: Adapter) -> dict[str, Tensor]:
        method: Any = adapter.method
        teacher = {**_all_parameters(adapter, "teacher."), **_averaged(adapter, "teacher.", method.teacher.weights)}
        return {**_all_parameters(adapter, "student."), **teacher}

    return run(recording, Recorded, final)


@replays("MEMO", of="memo")
def _memo(recording: Recording) -> Result:
    class Recorded(MEMO):
        """MEMO with the recorded views."""

        calls = -1

        def augmented(self, image: Tensor, engine: Engine) -> Tensor:
            self.calls += 1
            return recording.tensors[f"extra/views/{self.calls // self.iterations}"]  # all iterations use the same ones

    return run(recording, Recorded, lambda adapter: _determined(adapter, recording), trace_tolerance=1e-4)


def _determined(adapter: Adapter, recording: Recording) -> dict[str, Tensor]:
    """Return the parameters, with the recorded values where the direction of the update is not determined.

    AdamW divides by the size of the gradient. An element whose exact gradient is zero therefore moves in the direction of a
    rounding error. This holds for the bias of every key, on which softmax does not depend, and for single other elements.
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


def _recorded_views(recording: Recording, method: type[ROID]) -> type[ROID]:
    class Recorded(method):  # type: ignore[misc, valid-type]
        """A method with the recorded view of each sample, which also checks kept samples and average predictions."""

        calls = -1

        def augmented(self, images: Tensor, kept: Tensor, engine: Engine) -> Tensor:
            self.calls += 1
            recorded = recording.tensors["trace/diversity_minus_mean"][self.calls]
            if not torch.equal(kept, recorded[: len(kept)] >= 0):  # the last batch may be short
                raise ValueError(f"other samples are kept at step {self.calls}")
            return recording.tensors[f"extra/aug/{self.calls}"][kept]

        def ensemble(self, engine: Engine) -> None:
            super().ensemble(engine)
            average, recorded = self.average[: engine.num_classes], recording.tensors["trace/class_probs_ema"][self.calls]
            torch.testing.assert_close(average, recorded, atol=1e-5, rtol=0)

    return Recorded


@replays("ROID", of="roid")
def _roid(recording: Recording) -> Result:
    return run(recording, _recorded_views(recording, ROID))


@replays("CMF", of="cmf")
def _cmf(recording: Recording) -> Result:
    variances: list[float] = []

    class Recorded(_recorded_views(recording, CMF)):  # type: ignore[misc]
        def ensemble(self, engine: Engine) -> None:
            super().ensemble(engine)
            variances.append(float(self.variance))

    def final(adapter: Adapter) -> dict[str, Tensor]:
        method: Any = adapter.method
        return {**adapted_parameters(adapter), **_averaged(adapter, "hidden.", method.hidden.weights)}

    result = run(recording, Recorded, final)
    expected = recording.tensors["trace/hidden_variance"]
    result.compare("trace hidden_variance", torch.tensor(variances, dtype=torch.float64), expected, TRACE_TOLERANCE)
    return result


@replays("RoTTA (LayerNorm port)", of="rotta")
def _rotta(recording: Recording) -> Result:
    losses: list[float] = []
    memories: list[list[int]] = []
    batch = len(recording.tensors["x/0"])
    expected = recording.tensors.pop("trace/loss")  # recorded for each update, not for each step

    class Recorded(RoTTA):
        """RoTTA with the recorded view of each sample."""

        def augmented(self, images: Tensor, positions: Tensor, engine: Engine) -> Tensor:
            numbers = self.arrivals[positions].tolist()
            return torch.stack([recording.tensors[f"extra/aug/{n // batch}"][n % batch] for n in numbers])

        def learn(self, engine: Engine) -> tuple[int, float]:
            used, loss = super().learn(engine)
            losses.append(loss)
            return used, loss

        def step(self, images: Tensor, engine: Engine) -> Step:
            step = super().step(images, engine)
            held = sorted((c, n) for c, n in zip(self.labels.tolist(), self.arrivals.tolist()) if c != EMPTY)
            memories.append([n for _, n in held] + [-1] * (self.memory - len(held)))
            return step

    def final(adapter: Adapter) -> dict[str, Tensor]:
        method: Any = adapter.method
        student = {name.removeprefix("model/"): p.detach() for name, p in adapter.engine.adapted.named.items()}
        teacher = _averaged(adapter, "teacher.", method.teacher.weights)
        return {**{f"student.{name}": p for name, p in student.items()}, **teacher}

    result = run(recording, Recorded, final)
    result.compare("trace loss", torch.tensor(losses), expected, TRACE_TOLERANCE)
    result.compare("trace memory_sample_ids", torch.tensor(memories), recording.tensors["trace/memory_sample_ids"], 0)
    return result


@replays("AdaContrast (online port)", of="adacontrast")
def _adacontrast(recording: Recording) -> Result:
    labels: list[Tensor] = []

    class Recorded(AdaContrast):
        """AdaContrast with the recorded views and the recorded queue to begin with."""

        def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
            adapted = super().attach(view, setup)
            self.queue_features.copy_(recording.tensors["extra/queue_features"].T)
            self.queue_labels.copy_(recording.tensors["extra/queue_labels"])
            return adapted

        def views(self, images: Tensor, engine: Engine) -> tuple[Tensor, Tensor, Tensor]:
            weak, query, key = (recording.tensors[f"extra/{v}/{len(labels)}"] for v in ("weak", "strong_q", "strong_k"))
            return weak, query, key

        def pseudo_labels(self, logits: Tensor, features: Tensor) -> Tensor:
            labels.append(super().pseudo_labels(logits, features))
            return labels[-1]

    def final(adapter: Adapter) -> dict[str, Tensor]:
        method: Any = adapter.method
        return {
            **_all_parameters(adapter),
            **_all_parameters(adapter, "momentum_model."),
            **_averaged(adapter, "momentum_model.", method.teacher.weights),
            "bank_features": method.bank.features[: method.bank.held],
            "bank_probs": method.bank.probabilities[: method.bank.held, : adapter.engine.num_classes],
            "queue_features": method.queue_features.T,
            "queue_labels": method.queue_labels,
        }

    result = run(recording, Recorded, final, trace_tolerance=1e-4)
    for t, (ours, recorded) in enumerate(zip(labels, recording.tensors["trace/pseudo_labels"])):
        result.compare(f"pseudo labels of step {t}", ours, recorded[: len(ours)], 0)  # the last batch may be short
    return result
