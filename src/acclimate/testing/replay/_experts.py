"""Replay of MoETTA with the recorded routers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.adapter import Adapter
from ...core.engine import Engine
from ...core.method import Setup
from ...methods.moetta import Experts, MoETTA
from ...models.view import ModelView
from . import Recording, Result, replays, run


@replays("MoETTA", of="moetta")
def _moetta(recording: Recording) -> Result:
    extra, hyper = recording.group("extra/"), recording.hyper
    plain = hyper.pop("disabled_layers")
    if plain != list(range(len(plain))):
        raise ValueError(f"hyper-parameter disabled_layers={plain} is not supported")
    layers: dict[str, Experts] = {}
    seen: dict[str, Any] = {}

    class Recorded(MoETTA):
        """MoETTA that starts from the recorded routers, and from the recorded experts if there are any."""

        def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
            names = [name for name, module in view.model.named_modules() if isinstance(module, nn.LayerNorm)]
            adapted = list(super().attach(view, setup))
            for name, layer in zip(names[len(plain) :], self.layers):
                assert isinstance(layer, Experts)
                layers[name] = layer
                layer.router.load_state_dict({key: extra[f"router.{name}.{key}"] for key in ("weight", "bias")})
                with torch.no_grad():
                    for ours, theirs in ((layer.scale, "weight"), (layer.shift, "bias")):
                        found = [
                            t for key, t in extra.items() if key.startswith(f"experts.{name}.") and key.endswith(theirs)
                        ]
                        ours.copy_(found[0] if found else torch.zeros_like(ours))
            return adapted

        def routed(self, images: Tensor, engine: Engine) -> tuple[Tensor, Tensor]:
            logits, routes = super().routed(images, engine)
            experts = routes.argmax(-1)
            shares = F.one_hot(experts, self.experts).to(routes).mean(0)
            seen["expert"] = experts.T.tolist()
            seen["load_balance"] = float(self.experts * (shares * routes.detach().mean(0)).sum())
            return logits, routes

    def observe(adapter: Adapter, logits: Tensor) -> dict[str, Any]:
        method, record = adapter.method, adapter.record
        assert isinstance(method, MoETTA) and record is not None
        threshold = float(method.threshold)
        return {**seen, "threshold": threshold, "lb_weight": method.balance * threshold, "n_selected": record.used}

    parts = {
        "experts_weight": "scale",
        "experts_bias": "shift",
        "router.weight": "router.weight",
        "router.bias": "router.bias",
    }

    def final(adapter: Adapter) -> dict[str, Tensor]:
        named = ((name, layer, theirs, ours) for name, layer in layers.items() for theirs, ours in parts.items())
        return {f"{name}.{theirs}": layer.get_parameter(ours) for name, layer, theirs, ours in named}

    tolerance, whole = recording.tolerance_logits, len(recording.tensors["x/0"])
    plain_norms = len(plain)
    return run(recording, Recorded, final, observe, trace_tolerance=tolerance, plain_norms=plain_norms, micro_batch=whole)
