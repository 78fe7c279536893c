"""Replay of attention weights, and of the distances and rollouts computed from them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...analysis.attention import Layout, query_distances, reach, rollout_maps, rollouts
from . import Recording, Result, replays


@replays("attention rollout; mean attention distance")
def _attention(recording: Recording) -> Result:
    """Replay recorded weights, (blocks, heads, tokens, tokens), without and with a conditioner after the tokens."""
    hyper = recording.hyper
    if hyper["head_fusion"] != "mean":
        raise ValueError(f"head_fusion={hyper['head_fusion']!r} is not supported")
    rows, columns = hyper["grid"]
    layout = Layout(hyper["tokens"], rows, columns, hyper["patch_size"])
    plain = recording.tensors["extra/attention"]
    conditioned = recording.tensors["extra/attention_with_conditioner"][..., : layout.tokens, :]  # without its query
    near, far = reach(plain, layout), reach(conditioned, layout)
    how = {"residual": hyper["residual"]}
    ours: dict[str, Tensor] = {
        "distance_per_query": query_distances(plain, layout),
        "distance_per_query_renormalised": query_distances(plain, layout, renormalised=True),
        "mean_attention_distance": near.distance,
        "mean_attention_distance_renormalised": near.renormalised,
        "patch_attention_mass": near.on_patches,
        "mean_attention_distance_conditioner_raw": far.distance,
        "mean_attention_distance_conditioner_renormalised": far.renormalised,
        "conditioner_mass": far.on_added,
        "rollout_per_layer": torch.stack(list(rollouts(plain, layout, **how))),
        "rollout_cls_to_patches": rollout_maps(plain, layout, **how).flatten(),
        "rollout_conditioner_dropped": rollout_maps(conditioned, layout, **how).flatten(),
        "rollout_conditioner_to_cls": rollout_maps(conditioned, layout, added="class", **how).flatten(),
    }
    result = Result(recording.case)
    recorded = recording.group("final/")
    if ours.keys() != recorded.keys():
        result.problems.append(f"other results are recorded: {', '.join(sorted(ours.keys() ^ recorded.keys())[:3])}")
    for name in ours.keys() & recorded.keys():
        error = result.compare(name, ours[name], recorded[name], recording.tolerance_final)
        result.parameters = max(result.parameters, error)
    return result
