"""Replay recorded runs of the reference implementations: `python -m acclimate.testing.replay FILE...`.

A recording is a safetensors file with the model's weights, the batches, the output of the reference for each batch, its
adapted tensors at the end, and every hyper-parameter. This module runs acclimate's own implementation on the same batches,
with the public interface and `reference=True`, and compares the results. A recording of corruptions contains an image and
its corrupted copies, which are repeated with the recorded random numbers. A recording of attention contains attention
weights, and the distances and maps that were computed from them. The exit code is 1 if a file deviates, or if its method is
unknown.
"""

from __future__ import annotations

import argparse
import json
import math
import pkgutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ...core.adapt import adapt
from ...core.adapter import Adapter
from ...core.engine import entropy
from ...core.method import Method
from ...core.registry import find_method
from ...methods._losses import COME_MASS

# The option of the method or of the adapter, by the recorded name of a hyper-parameter.
OPTIONS = {
    "adam_betas": "betas",
    "affinity": "affinity",
    "alignment_weight": "alignment",
    "alpha": "alpha",
    "beta1": "momentum",
    "alpha_lr": "lr_noise",
    "alpha_momentum": "momentum_noise",
    "anchor_threshold": "threshold",
    "batch_size": "batch_size",
    "beta": "beta",
    "bound_lambda": "weight",
    "class_indices": "classes",
    "d_margin": "redundancy",
    "dct_lr": "lr_generator",
    "delayed_start": "delay",
    "dot_momentum": "decay",
    "e_margin": "margin",
    "ema_momentum": "decay",
    "entropy_weight": "entropy_weight",
    "eps_clip": "bet_limit",
    "eta": "eta",
    "filter_k": "supports_per_class",
    "fisher_alpha": "fisher_weight",
    "fitness_lambda": "discrepancy",
    "force_symmetry": "symmetric",
    "freq_mask_ratio": "dropped_frequencies",
    "full_moments": "moments",
    "gamma": "gamma",
    "knn": "neighbours",
    "lb_coeff": "balance",
    "lambda": "ranking",
    "lambda1": "moment_weight",
    "lambda2": "class_weight",
    "lambda_t": "lambda_t",
    "lambda_u": "lambda_u",
    "leak_optimizer_state": "leak_optimizer_state",
    "low_frequency_fraction": "low_frequencies",
    "lr": "lr",
    "m": "removed",
    "margin": "margin",
    "margin_L0": "weight_margin",
    "margin_e0": "margin",
    "max_grad_norm": "clip",
    "max_steps": "max_iterations",
    "memory_size": "memory",
    "momentum": "momentum",
    "momentum_probs": "decay",
    "momentum_src": "source_momentum",
    "n": "views",
    "n_augmentations": "views",
    "n_views": "views",
    "nesterov": "nesterov",
    "niter": "iterations",
    "noise_ratio": "noise",
    "nu": "nu",
    "num_expert": "experts",
    "num_neighbors": "neighbours",
    "num_prompts": "prompts",
    "patch_len": "grid",
    "plpd_threshold": "threshold",
    "population": "population",
    "predictor_lr": "lr_predictor",
    "probs_momentum": "decay",
    "q": "q",
    "queue_size": "queue",
    "refine_after": "refine_after",
    "reset_constant": "recovery",
    "reset_period": "period",
    "restore_prob": "restore",
    "reweight_ent": "entropy_weight",
    "reweight_plpd": "plpd_weight",
    "reweight_threshold": "max_weight",
    "reweighted": "reweighted",
    "rho": "rho",
    "tau": "tau",
    "teacher_momentum": "teacher_momentum",
    "temperature": "temperature",
    "update_frequency": "every",
    "weight_decay": "weight_decay",
    "weight_margin": "weight_margin",
    "weight_reg": "instability",
}
# Hyper-parameters that are no options of our implementations, with the only value that we support.
FIXED = {
    "class_moments": 1,
    "distance": "cosine",
    "episodic": False,
    "steps": 1,
    "topk": 1,
    "uncertainty_mass": COME_MASS,
    "value_range": 2.0,
}
# Text, or implied by tensors.
DESCRIPTIONS = {
    "adapt",
    "fisher_batch_size",
    "form",
    "hidden",
    "margin_coefficient",
    "n_generator_blocks",
    "optimizer",
    "params",
}
TRACE_TOLERANCE = 1e-5


class Recording:
    """A recorded run of a reference implementation."""

    def __init__(self, path: str | Path) -> None:
        with safe_open(str(path), "pt") as file:
            self.tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        self.case = metadata.get("case", Path(path).stem)
        self.method = metadata.get("method", "unknown")
        self.source = metadata.get("source", "unknown")  # the code that ran
        self.hyper: dict[str, Any] = json.loads(metadata.get("hyper", "{}"))
        self.model_kwargs: dict[str, Any] = json.loads(metadata.get("model_kwargs", "{}"))
        self.tolerance_logits = float(metadata.get("tolerance_logits", "nan"))  # no deviation is within NaN
        self.tolerance_final = float(metadata.get("tolerance_final", "nan").split()[0])  # text may follow the number

    def group(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with a prefix, without the prefix."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def batches(self) -> Iterable[tuple[int, Tensor, Tensor]]:
        """Yield the number of each step, its batch, and the recorded output."""
        for t in range(len(self.group("x/"))):
            yield t, self.tensors[f"x/{t}"], self.tensors[f"logits/{t}"]

    def model(self) -> nn.Module:
        """Return the model with the recorded weights."""
        model = VisionTransformer(**self.model_kwargs)
        model.load_state_dict(self.group("model/"))
        return model

    def options(self) -> dict[str, Any]:
        """Return the recorded hyper-parameters as options, and raise an error for one that is not supported."""
        options: dict[str, Any] = {}
        for name, value in self.hyper.items():
            if name in OPTIONS:
                options[OPTIONS[name]] = value
            elif name == "returns" and str(value).startswith("pre-update"):
                continue
            elif name not in DESCRIPTIONS and FIXED.get(name) != value:
                raise ValueError(f"hyper-parameter {name}={value!r} is not supported")
        return options


@dataclass
class Result:
    """The deviations of a replay from its recording."""

    case: str
    logits: float = 0.0
    parameters: float = 0.0
    problems: list[str] = field(default_factory=list)
    levels: dict[str, str] = field(default_factory=dict)  # deviation of each corruption

    def compare(self, what: str, ours: Tensor, recorded: Tensor, tolerance: float) -> float:
        """Return the largest deviation, and add a problem if it exceeds the tolerance.

        NaN equals NaN.
        """
        ours, recorded = ours.detach().double(), recorded.double()
        if ours.shape != recorded.shape or not torch.equal(ours.isnan(), recorded.isnan()):
            self.problems.append(f"{what}: shape or NaN pattern differs")
            return math.inf
        error = float((ours - recorded).nan_to_num().abs().max()) if ours.numel() else 0.0
        if not error <= tolerance:
            self.problems.append(f"{what}: off by {error:.1e}, tolerance {tolerance:.0e}")
        return error

    def __str__(self) -> str:
        verdict = "pass" if not self.problems else f"FAIL  {'; '.join(self.problems[:3])}"
        if self.levels:
            return f"{self.case:<20} grey levels off: {', '.join(f'{k} {v}' for k, v in self.levels.items())}  {verdict}"
        return f"{self.case:<20} logits {self.logits:.1e}  parameters {self.parameters:.1e}  {verdict}"


Replay = Callable[[Recording], Result]
REPLAYS: dict[str, Replay] = {}
CHECKED: dict[str, str] = {}  # our method that a recording checks, by the name of the method in the recording


def replays(*recorded: str, of: str | None = None) -> Callable[[Replay], Replay]:
    """Return a decorator that registers a function as the replay of recordings.

    Args:
        *recorded: The names of the method in the recordings.
        of: Our name of the method; None if the recordings check no method.
    """

    def decorate(function: Replay) -> Replay:
        REPLAYS.update(dict.fromkeys(recorded, function))
        if of is not None:
            CHECKED.update(dict.fromkeys(recorded, of))
        return function

    return decorate


def run(
    recording: Recording,
    method: str | type[Method],
    final: Callable[[Adapter], dict[str, Tensor]] | None = None,
    observe: Callable[[Adapter, Tensor], dict[str, Any]] = lambda adapter, logits: {},
    returned: Callable[[Tensor], Tensor] = lambda logits: logits,
    *,
    trace_tolerance: float = TRACE_TOLERANCE,
    **more: Any,
) -> Result:
    """Feed the recorded batches to an adapter, and compare logits, values of each step, and final tensors.

    Args:
        recording: The recording.
        method: The name of our method, or a class that uses the recorded random numbers.
        final: A function that returns the tensors to compare at the end. Default: the model's adapted parameters and their
            momentum.
        observe: A function that returns further values of a step, or replaces usual ones, given the adapter and its logits.
        returned: A function that converts our logits to what the reference returns instead.
        trace_tolerance: The largest allowed deviation of a value of a step.
        **more: Options that are not in the recording.
    """
    result = Result(recording.case)
    options = recording.options()
    if "batch_size" not in find_method(method).options():
        options.pop("batch_size", None)  # no default depends on it
    # a method that augments needs a normalisation, even if its views are recorded
    adapter = adapt(recording.model(), method, reference=True, mean=0.5, std=0.5, **options, **more)
    margin = recording.hyper.get("margin_e0", recording.hyper.get("e_margin", math.inf))
    trace: dict[str, list[Any]] = {}
    learning = recording.hyper.get("adapt")  # by step; only recordings of a method that can be frozen have it
    for t, images, expected in recording.batches():
        with nullcontext() if learning is None or learning[t] else adapter.frozen():
            logits = adapter(images)
        error = result.compare(f"logits of step {t}", returned(logits), expected, recording.tolerance_logits)
        result.logits = max(result.logits, error)
        row = {"entropy_1": entropy(logits), **recorded_by(adapter), **observe(adapter, logits)}
        h = row["entropy_1"].tolist()
        row.setdefault("n_selected_1", sum(value < margin for value in h))
        row["entropy_1"] = h + [math.nan] * (len(recording.tensors["x/0"]) - len(h))  # the last batch may be short
        for name, value in row.items():
            trace.setdefault(name, []).append(value)
    for name, expected in recording.group("trace/").items():
        if name in trace:  # an adapter does not report entropy_2, which belongs to the second pass
            tolerance = recording.tolerance_logits if name == "entropy_1" else trace_tolerance
            ours = [torch.tensor(values, dtype=torch.float64) for values in trace[name]]
            if len(images) < len(recording.tensors["x/0"]):
                ours[-1] = completed(ours[-1], expected[-1])
            result.compare(f"trace {name}", torch.stack(ours), expected, tolerance)
    adapted, recorded = (final or adapted_parameters)(adapter), recording.group("final/")
    momentum = any(name.startswith("momentum.") for name in recorded)
    adapted = {name: t for name, t in adapted.items() if momentum or not name.startswith("momentum.")}
    if adapted.keys() != recorded.keys():
        result.problems.append(f"adapted tensors differ: {', '.join(sorted(adapted.keys() ^ recorded.keys())[:3])}")
    for name in adapted.keys() & recorded.keys():
        error = result.compare(name, adapted[name], recorded[name], recording.tolerance_final)
        result.parameters = max(result.parameters, error)
    return result


def recorded_by(adapter: Adapter) -> dict[str, Any]:
    """Return what an adapter's record says of the last step. A frozen adapter has no record before its first step."""
    record = adapter.record
    return {
        "n_selected_2": 0 if record is None else record.used,
        "loss": math.nan if record is None or record.loss is None else record.loss,
        "ema": math.nan if record is None or record.recovery is None else record.recovery,
        "reset": int(record is not None and record.event == "recovered"),
    }


def completed(values: Tensor, recorded: Tensor) -> Tensor:
    """Return the values of a short last batch in the recorded shape. The places of samples that it lacks are not compared.

    They are therefore filled with what is recorded there.
    """
    if values.ndim != recorded.ndim:
        return values
    whole = recorded.double().clone()
    whole[tuple(slice(size) for size in values.shape)] = values
    return whole


def adapted_parameters(adapter: Adapter) -> dict[str, Tensor]:
    """Return the model's adapted parameters and their momentum buffers, by their names in timm."""
    final: dict[str, Tensor] = {}
    for name, p in adapter.engine.adapted.named.items():
        if name.startswith("model/"):
            add_with_momentum(final, adapter, name.removeprefix("model/"), p)
    return final


def add_with_momentum(final: dict[str, Tensor], adapter: Adapter, name: str, *parts: nn.Parameter) -> None:
    """Add a recorded tensor, which may consist of several parts here, and its momentum to the final tensors."""
    optimizer = adapter.engine.adapted.optimizer
    assert optimizer is not None
    final[name] = torch.cat([p.detach() for p in parts])
    momenta = [optimizer.state[p].get("momentum_buffer") for p in parts]
    final[f"momentum.{name}"] = torch.cat([torch.zeros_like(p) if m is None else m for p, m in zip(parts, momenta)])


def replay(path: str | Path) -> Result:
    """Replay one file. Any error becomes a problem in the result."""
    try:
        recording = Recording(path)
    except (OSError, SafetensorError, ValueError, LookupError) as error:
        return Result(Path(path).stem, math.nan, math.nan, [f"not a readable recording: {error!r}"])
    again = REPLAYS.get(recording.method)
    if again is None:
        return Result(recording.case, math.nan, math.nan, [f"unknown method {recording.method!r}"])
    try:
        return again(recording)
    except Exception as error:  # an error in one file must not prevent the replay of others
        return Result(recording.case, math.nan, math.nan, [f"{type(error).__name__}: {error}"])


def main(arguments: list[str] | None = None) -> int:
    """Replay the files given as arguments, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m acclimate.testing.replay", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE", help="recordings (.safetensors)")
    failed = 0
    for path in parser.parse_args(arguments).files:
        result = replay(path)
        failed += bool(result.problems)
        print(result, flush=True)
    return int(failed > 0)


for _module in pkgutil.iter_modules(__path__):
    if _module.name != "__main__":
        import_module(f"{__name__}.{_module.name}")  # each module registers its functions
