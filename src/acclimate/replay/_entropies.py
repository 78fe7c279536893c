"""Methods that minimise an entropy and have no random part."""

from __future__ import annotations

from . import Recording, Result, replays, run


@replays("SAR")
def _sar(recording: Recording) -> Result:
    return run(recording, "sar")


@replays("TENT (LayerNorm)")
def _tent(recording: Recording) -> Result:
    return run(recording, "tent")
