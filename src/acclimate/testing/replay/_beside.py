"""Replays of methods that adjust predictions without changing the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.adapter import Adapter
from ...methods.neo import NEO
from ...methods.t3a import T3A
from . import Recording, Result, replays, run


@replays("T3A", of="t3a")
def _t3a(recording: Recording) -> Result:
    return run(recording, "t3a", _bank)


def _bank(adapter: Adapter) -> dict[str, Tensor]:
    """Return the filled entries of the bank, sorted by class and then by entropy."""
    method = adapter.method
    assert isinstance(method, T3A)
    filled = method.entropies.isfinite()
    return {
        "supports": method.supports[filled],
        "entropies": method.entropies[filled],
        "labels": filled.nonzero()[:, 0],
    }


@replays("LAME", of="lame")
def _lame(recording: Recording) -> Result:
    recording.hyper["affinity"] = recording.hyper["affinity"].lower()
    return run(recording, "lame", lambda _: {}, returned=Tensor.exp)


@replays("NEO", "NEO-Continual", of="neo")
def _neo(recording: Recording) -> Result:
    recording.hyper.pop("returns")  # logits after the centre has moved, as ours

    def final(adapter: Adapter) -> dict[str, Tensor]:
        method = adapter.method
        assert isinstance(method, NEO)
        count = {} if recording.method == "NEO-Continual" else {"sample_count": method.count}
        return {"center": method.centre, **count}

    def observe(adapter: Adapter, logits: Tensor) -> dict[str, Any]:
        return {name: tensor.tolist() for name, tensor in final(adapter).items()}

    return run(recording, "neo", final, observe)
