"""Methods with a predictor before the head."""

from __future__ import annotations

from torch import Tensor

from ..adapter import Adapter
from ..methods._siamese import Siamese
from . import Recording, Result, adapted_parameters, note, replays, run


@replays("ZeroSiam")
def _zerosiam(recording: Recording) -> Result:
    return run(recording, "zerosiam", _final)


def _final(adapter: Adapter) -> dict[str, Tensor]:
    final = adapted_parameters(adapter)
    assert isinstance(adapter.method, Siamese)
    note(final, adapter, "predictor.weight", adapter.method.predictor)
    return final
