"""Replays of methods that minimise an entropy and draw no random numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.adapter import Adapter
from ...core.statistics import source_statistics
from ...methods._losses import COME_MASS, opinion_entropy
from ...methods.delta import DELTA
from ...methods.eta import ETA
from . import Recording, Result, replays, run


@replays("SAR", of="sar")
def _sar(recording: Recording) -> Result:
    return run(recording, "sar")


@replays("TENT (LayerNorm)", of="tent")
def _tent(recording: Recording) -> Result:
    return run(recording, "tent")


@replays("ETA (EATA without Fisher)", of="eta")
def _eta(recording: Recording) -> Result:
    return run(recording, "eta", observe=_average)


@replays("RDumb", of="rdumb")
def _rdumb(recording: Recording) -> Result:
    return run(recording, "rdumb", observe=_average)


@replays("EATA", of="eata")
def _eata(recording: Recording) -> Result:
    """Replay EATA with Fisher information computed from the recorded images, which must equal the recorded one."""
    images, size = recording.tensors["extra/source_images"], recording.hyper["fisher_batch_size"]
    statistics = source_statistics(recording.model(), images, kinds=["fisher"], batch_size=size, samples=len(images))
    result = run(recording, "eata", observe=_average, source_statistics=statistics)
    recorded, ours = recording.group("extra/fisher."), statistics.of("fisher")
    if recorded.keys() != ours.keys():
        result.problems.append("the Fisher information is of other parameters")
    for name in recorded.keys() & ours.keys():
        result.compare(f"Fisher information of {name}", ours[name], recorded[name], recording.tolerance_final)
    return result


@replays("COME-TENT", of="tent")
def _come_tent(recording: Recording) -> Result:
    return run(recording, "tent", observe=_opinion, loss="come")


@replays("COME-SAR", of="sar")
def _come_sar(recording: Recording) -> Result:
    return run(recording, "sar", observe=_opinion, loss="come")


@replays("COME-ETA", of="eta")
def _come_eta(recording: Recording) -> Result:
    return run(recording, "eta", observe=lambda *what: _average(*what) | _opinion(*what), loss="come")


def _opinion(adapter: Adapter, logits: Tensor) -> dict[str, Any]:
    return {"entropy_1": opinion_entropy(logits, COME_MASS)}


@replays("DELTA (DOT only, LayerNorm)", of="delta")
def _delta(recording: Recording) -> Result:
    return run(recording, "delta", observe=_shares)


def _shares(adapter: Adapter, logits: Tensor) -> dict[str, Any]:
    assert isinstance(adapter.method, DELTA)
    return {"qhat": adapter.method.shares[: adapter.engine.num_classes].tolist()}


def _average(adapter: Adapter, logits: Tensor) -> dict[str, Any]:
    assert isinstance(adapter.method, ETA)
    return {"model_probs": adapter.method.average[: adapter.engine.num_classes].tolist()}
