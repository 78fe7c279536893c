"""Replays of DCT, and of its attention module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from ...core.adapter import Adapter
from ...core.method import Setup
from ...methods.dct import DCT, Conditioner
from ...models.families.timm import TimmAttention
from ...models.view import ModelView
from . import Recording, Result, adapted_parameters, add_with_momentum, replays, run


def _fill(conditioner: nn.Module, weight: Tensor, bias: Tensor) -> None:
    assert isinstance(conditioner, Conditioner) and conditioner.weights is not None
    with torch.no_grad():
        for part, w, b in zip("qkv", weight.chunk(3), bias.chunk(3)):
            conditioner.weights[part].copy_(w)
            conditioner.biases[part].copy_(b)


@replays("DCT", of="dct")
def _dct(recording: Recording) -> Result:
    extra = recording.group("extra/")

    class Recorded(DCT):
        """DCT whose generators start from the recorded values."""

        def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
            adapted = super().attach(view, setup)
            if len(self.generators) != recording.hyper["n_generator_blocks"]:
                raise ValueError(f"{recording.hyper['n_generator_blocks']} generator blocks in a model of {self._depth}")
            for block, conditioner in self.generators.items():
                name = f"blocks.{block}.attn.domain_conditioner_generator"
                _fill(conditioner, extra[f"{name}.weight"], extra[f"{name}.bias"])
            return adapted

    return run(recording, Recorded, _final)


def _final(adapter: Adapter) -> dict[str, Tensor]:
    """Return the final tensors in the layout of the reference.

    The reference has one (3 width, width) generator per block. Ours has parts, and the part of the query never changes.
    """
    final = adapted_parameters(adapter)
    assert isinstance(adapter.method, DCT)
    for block in {name.split(".")[1] for name in adapter.engine.adapted.named if name.startswith("method/generators.")}:
        conditioner: Any = adapter.method.generators[block]
        for theirs, ours in (("weight", conditioner.weights), ("bias", conditioner.biases)):
            parts = (ours[part] for part in "qkv")
            add_with_momentum(final, adapter, f"blocks.{block}.attn.domain_conditioner_generator.{theirs}", *parts)
    return final


@replays("DCT attention module", of="dct")
def _dct_attention(recording: Recording) -> Result:
    """Replay one conditioned attention module: output, attention, conditioners and gradients."""
    result = Result(recording.case)
    extra, final = recording.group("extra/"), recording.group("final/")
    width, heads = recording.hyper["embed_dim"], recording.hyper["num_heads"]
    inner = Attention(width, num_heads=heads, qkv_bias=recording.hyper["qkv_bias"])
    inner.load_state_dict({name: extra[name] for name in inner.state_dict()})
    conditioner = Conditioner(width, heads, parts="qkv", generator=True, zero=False, rng=torch.Generator())
    _fill(conditioner, extra["domain_conditioner_generator.weight"], extra["domain_conditioner_generator.bias"])
    attention = TimmAttention(inner, heads)
    attention.condition(conditioner.key_value)
    outputs, weights, generated = [], [], []
    for t, tokens, expected in recording.batches():
        tokens.requires_grad_(True)
        outputs.append(attention(tokens))
        result.logits = max(result.logits, result.compare(f"call {t}", outputs[-1], expected, recording.tolerance_logits))
        all_three = conditioner.conditioners(tokens[:, 0])
        q, k, _ = attention.project(tokens)
        q, k = torch.cat([q, all_three[0]], 2), torch.cat([k, all_three[1]], 2)
        weights.append((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1))
        generated.append(all_three)
    (outputs[0] * extra["upstream_gradient"]).sum().backward()
    query_gradient = [p.grad for p in (conditioner.weights["q"], conditioner.biases["q"])] if conditioner.weights else []
    if any(g is not None for g in query_gradient):
        result.problems.append("the query's third of the generator has a gradient")
    ours: dict[str, Tensor | None] = {
        "output": outputs[0],
        "output_second": outputs[1],
        "attention": weights[0],
        "attention_second": weights[1],
        "conditioners": generated[0],
        "conditioners_second": generated[1],
        "grad.input": recording.tensors["x/0"].grad,
        **{f"grad.{name}": p.grad for name, p in inner.named_parameters()},
    }
    for kind, theirs in (("weights", "weight"), ("biases", "bias")):
        k, v = (getattr(conditioner, kind)[part].grad for part in "kv")
        ours[f"grad.domain_conditioner_generator.{theirs}"] = torch.cat([torch.zeros_like(k), k, v])
    for name, expected in final.items():
        mine = ours.get(name)
        if mine is None:
            result.problems.append(f"{name}: not compared")
            continue
        result.parameters = max(result.parameters, result.compare(name, mine, expected, recording.tolerance_final))
    return result
