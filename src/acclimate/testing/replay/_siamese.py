"""Replays of methods with a predictor before the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.adapter import Adapter
from ...core.engine import Engine
from ...methods._siamese import Siamese
from ...methods.spa import SPA, low_frequencies
from . import Recording, Result, adapted_parameters, add_with_momentum, replays, run


@replays("ZeroSiam", of="zerosiam")
def _zerosiam(recording: Recording) -> Result:
    return run(recording, "zerosiam", _final)


def _final(adapter: Adapter) -> dict[str, Tensor]:
    final = adapted_parameters(adapter)
    assert isinstance(adapter.method, Siamese)
    add_with_momentum(final, adapter, "predictor.weight", adapter.method.predictor)
    return final


@replays("SPA", of="spa")
def _spa(recording: Recording) -> Result:
    extra = recording.group("extra/")
    step = iter(range(len(recording.group("x/"))))

    class Recorded(SPA):
        """SPA with the recorded noise of each patch, and the recorded choice of frequencies.

        The reference also shifts the spectrum along the batch and the channels, so that its flags belong to other samples.
        """

        def draw(self, images: Tensor, engine: Engine) -> tuple[Tensor, Tensor]:
            t = next(step)
            noise, flags = extra[f"patch_noise/{t}"], extra[f"frequency_keep/{t}"].bool()
            grid = self.alpha.shape[0]
            noise = noise.unflatten(0, (grid, grid)).permute(2, 0, 3, 1, 4).flatten(-2).flatten(-3, -2)
            (top, left), (height, width) = low_frequencies(flags.shape[-2:], self.low_frequencies), flags.shape[-2:]
            rows, columns = (slice(n // 2 - half, n // 2 + half) for n, half in ((height, top), (width, left)))
            return noise, torch.fft.ifftshift(flags, dim=(0, 1))[..., rows, columns]

    def observe(adapter: Adapter, logits: Tensor) -> dict[str, Any]:
        assert isinstance(adapter.method, SPA)
        return {"alpha": adapter.method.alpha.detach().flatten().tolist()}

    def final(adapter: Adapter) -> dict[str, Tensor]:
        method = adapter.method
        assert isinstance(method, SPA)
        return {**_final(adapter), "patch_alpha": method.alpha.detach().flatten()}

    tolerance = recording.tolerance_final
    return run(recording, Recorded, final, observe=observe, trace_tolerance=tolerance)
