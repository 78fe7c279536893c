"""Replay recorded runs of the reference implementations: `python -m acclimate.replay FILE...`.

A recording is a safetensors file with the model's weights, the batches, what the reference returned for each, its adapted
tensors at the end and every hyper-parameter. This module drives acclimate's own implementation with them, through the public
interface and with `reference=True`, and compares. A recording of corruptions holds a picture and what became of it, which is
repeated with the random numbers of the recording. It exits with 1 if any file deviates or is of a method it does not know.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn

from ._families import TimmAttention
from .adapter import Adapter
from .data import corruptions
from .engine import entropy
from .method import Method, find
from .methods.dct import DCT, Conditioner
from .vit import ViT
from .wrap import adapt

# recorded name of a hyper-parameter -> option of the method or of the adapter
OPTIONS = {
    "batch_size": "batch_size",
    "class_indices": "classes",
    "dct_lr": "lr_generator",
    "ema_momentum": "decay",
    "lr": "lr",
    "margin_e0": "margin",
    "momentum": "momentum",
    "reset_constant": "recovery",
    "rho": "rho",
}
# hyper-parameters that our implementations have no choice about, and the only value that fits them
FIXED = {"steps": 1, "episodic": False}
DESCRIPTIONS = {"optimizer", "n_generator_blocks"}  # prose; implied by the tensors
TRACE_TOLERANCE = 1e-5
# Grey levels by which a corruption may differ. The originals cut off fractions, so that a rounding error can be a whole
# level, and two where the result of one filter goes through another.
LEVELS = dict.fromkeys((*corruptions.CORRUPTIONS, *corruptions.EXTRA), 1) | dict.fromkeys(
    ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow", "fog", "elastic_transform", "gaussian_blur"), 2
)
STRAY = 0.002  # share of values that the edge detector inside spatter may put elsewhere


class Recording:
    """One golden file."""

    def __init__(self, path: str | Path) -> None:
        with safe_open(str(path), "pt") as file:
            self.tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        self.case = metadata.get("case", Path(path).stem)
        self.method = metadata.get("method", "unknown")
        self.hyper: dict[str, Any] = json.loads(metadata.get("hyper", "{}"))
        self.model_kwargs: dict[str, Any] = json.loads(metadata.get("model_kwargs", "{}"))
        self.tolerance_logits = float(metadata.get("tolerance_logits", "nan"))  # nothing is within NaN
        self.tolerance_final = float(metadata.get("tolerance_final", "nan"))

    def group(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def batches(self) -> Iterable[tuple[int, Tensor, Tensor]]:
        for t in range(len(self.group("x/"))):
            yield t, self.tensors[f"x/{t}"], self.tensors[f"logits/{t}"]

    def model(self) -> nn.Module:
        model = VisionTransformer(**self.model_kwargs)
        model.load_state_dict(self.group("model/"))
        return model

    def options(self) -> dict[str, Any]:
        """Every hyper-parameter of the file as an option; one that cannot be honoured is an error."""
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
    """How far a replay was from its recording."""

    case: str
    logits: float = 0.0
    parameters: float = 0.0
    problems: list[str] = field(default_factory=list)
    levels: dict[str, str] = field(default_factory=dict)  # of a recording of corruptions: how far each was off

    def compare(self, what: str, ours: Tensor, recorded: Tensor, tolerance: float) -> float:
        """Largest deviation; beyond the tolerance it is a problem. NaN matches NaN."""
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


def _run(recording: Recording, method: str | type[Method]) -> Result:
    """Feed the recorded batches to an adapter and compare logits, per-step traces and final tensors."""
    result = Result(recording.case)
    adapter = adapt(recording.model(), method, reference=True, **recording.options())
    trace: dict[str, list[Any]] = {
        name: [] for name in ("entropy_1", "n_selected_1", "n_selected_2", "loss", "ema", "reset")
    }
    for t, images, expected in recording.batches():
        logits = adapter(images)
        error = result.compare(f"logits of step {t}", logits, expected, recording.tolerance_logits)
        result.logits = max(result.logits, error)
        h, record = entropy(logits), adapter.record
        assert record is not None
        trace["entropy_1"].append(h.tolist() + [math.nan] * (len(recording.tensors["x/0"]) - len(h)))  # a short last batch
        trace["n_selected_1"].append(int((h < recording.hyper.get("margin_e0", math.inf)).sum()))
        trace["n_selected_2"].append(record.used)
        trace["loss"].append(math.nan if record.loss is None else record.loss)
        trace["ema"].append(math.nan if record.recovery is None else record.recovery)
        trace["reset"].append(int(record.event == "recovered"))
    for name, expected in recording.group("trace/").items():
        if name in trace:  # entropy_2, inside the second pass, is not something an adapter reports
            tolerance = recording.tolerance_logits if name == "entropy_1" else TRACE_TOLERANCE
            result.compare(f"trace {name}", torch.tensor(trace[name], dtype=torch.float64), expected, tolerance)
    adapted, recorded = _final(adapter), recording.group("final/")
    momentum = any(name.startswith("momentum.") for name in recorded)
    adapted = {name: t for name, t in adapted.items() if momentum or not name.startswith("momentum.")}
    if adapted.keys() != recorded.keys():
        result.problems.append(f"adapted tensors differ: {', '.join(sorted(adapted.keys() ^ recorded.keys())[:3])}")
    for name in adapted.keys() & recorded.keys():
        error = result.compare(name, adapted[name], recorded[name], recording.tolerance_final)
        result.parameters = max(result.parameters, error)
    return result


def _final(adapter: Adapter) -> dict[str, Tensor]:
    """Adapted parameters and momentum buffers under the names that timm and the reference code give them."""
    optimizer = adapter.engine.optimizer
    assert optimizer is not None
    final: dict[str, Tensor] = {}

    def note(name: str, *parts: nn.Parameter) -> None:
        final[name] = torch.cat([p.detach() for p in parts])
        momenta = [optimizer.state[p].get("momentum_buffer") for p in parts]
        final[f"momentum.{name}"] = torch.cat([torch.zeros_like(p) if m is None else m for p, m in zip(parts, momenta)])

    for name, p in adapter.engine.named.items():
        if name.startswith("model/"):
            note(name.removeprefix("model/"), p)
    if isinstance(adapter.method, DCT):
        # the reference keeps one (3 width, width) generator per block; ours is in parts, of which the query's never changes
        for block in {name.split(".")[1] for name in adapter.engine.named if name.startswith("method/generators.")}:
            conditioner: Any = adapter.method.generators[block]
            for theirs, ours in (("weight", conditioner.weights), ("bias", conditioner.biases)):
                note(f"blocks.{block}.attn.domain_conditioner_generator.{theirs}", *(ours[part] for part in "qkv"))
    return final


def _fill(conditioner: nn.Module, weight: Tensor, bias: Tensor) -> None:
    assert isinstance(conditioner, Conditioner) and conditioner.weights is not None
    with torch.no_grad():
        for part, w, b in zip("qkv", weight.chunk(3), bias.chunk(3)):
            conditioner.weights[part].copy_(w)
            conditioner.biases[part].copy_(b)


def _dct(recording: Recording) -> Result:
    extra = recording.group("extra/")

    class Recorded(DCT):
        """DCT whose generators start from the recorded values."""

        def attach(self, vit: ViT, rng: torch.Generator) -> Iterable[nn.Parameter]:
            adapted = super().attach(vit, rng)
            if len(self.generators) != recording.hyper["n_generator_blocks"]:
                raise ValueError(f"{recording.hyper['n_generator_blocks']} generator blocks in a model of {self._depth}")
            for block, conditioner in self.generators.items():
                name = f"blocks.{block}.attn.domain_conditioner_generator"
                _fill(conditioner, extra[f"{name}.weight"], extra[f"{name}.bias"])
            return adapted

    return _run(recording, Recorded)


def _dct_attention(recording: Recording) -> Result:
    """One conditioned attention module: output, attention, conditioners and gradients."""
    result = Result(recording.case)
    extra, final = recording.group("extra/"), recording.group("final/")
    width, heads = recording.hyper["embed_dim"], recording.hyper["num_heads"]
    inner = Attention(width, num_heads=heads, qkv_bias=recording.hyper["qkv_bias"])
    inner.load_state_dict({name: extra[name] for name in inner.state_dict()})
    conditioner = Conditioner(width, heads, parts="qkv", generator=True, zero=False, rng=torch.Generator())
    _fill(conditioner, extra["domain_conditioner_generator.weight"], extra["domain_conditioner_generator.bias"])
    attention = TimmAttention(inner, heads)
    attention.extra = conditioner.key_value
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


class _RecordedRandom:
    """numpy's old generator, used in the recordings, under the new one's names. For salt and pepper, another was used."""

    def __init__(self, seed: int, seed_of_random: int) -> None:
        legacy = np.random.RandomState(seed)
        self.standard_normal, self.uniform, self.poisson = legacy.standard_normal, legacy.uniform, legacy.poisson
        self.integers = legacy.randint
        self.random = np.random.default_rng(seed_of_random).random


def _corruptions(recording: Recording) -> Result:
    """The recorded picture under every corruption and severity, with the recorded random numbers and crop of ice."""
    result = Result(recording.case)
    hyper = recording.hyper
    other = re.fullmatch(r"numpy default_rng\((\d+)\)", hyper["random_noise_rng"])
    if other is None:
        raise ValueError(f"random_noise_rng={hyper['random_noise_rng']!r} is not supported")
    image = recording.tensors["x/image"].numpy()
    crop = recording.tensors["extra/frost_crop"].numpy()
    recorded = recording.group("final/")
    if recorded.keys() != {f"{name}/{severity}" for name in hyper["corruptions"] for severity in hyper["severities"]}:
        result.problems.append("the pictures are not those that the header lists")
    worst: dict[str, tuple[float, ...]] = {}
    for case, expected in recorded.items():
        name, severity = case.split("/")
        rng = _RecordedRandom(hyper["numpy_seed"], int(other[1]))
        ours = corruptions.apply(image[None], name, int(severity), [rng], constants="imagenet-c", textures=lambda *_: crop)
        off = abs(ours[0].astype(int) - expected.numpy())
        measured = (float(off.max()), float(off.mean()), float((off > LEVELS[name]).mean()))
        worst[name] = tuple(map(max, worst.get(name, measured), measured))
    for name, (largest, mean, beyond) in worst.items():
        result.levels[name] = f"{largest:.0f}"
        if name == "jpeg_compression":  # depends on the codec
            within, result.levels[name] = mean < 1, f"{largest:.0f} (mean {mean:.2f})"
        elif name == "spatter":
            within, result.levels[name] = beyond < STRAY, f"{largest:.0f} (beyond 1: {beyond:.2%})"
        else:
            within = beyond == 0
        if not within:
            result.problems.append(f"{name}: off by {result.levels[name]}")
    return result


REPLAYS: dict[str, Callable[[Recording], Result]] = {
    "DCT": _dct,
    "DCT attention module": _dct_attention,
    "ImageNet-C corruption formulas": _corruptions,
    "SAR": lambda recording: _run(recording, find("sar")),
    "TENT (LayerNorm)": lambda recording: _run(recording, find("tent")),
}


def replay(path: str | Path) -> Result:
    """Replay one file. Whatever goes wrong is a problem in the result."""
    try:
        recording = Recording(path)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        return Result(Path(path).stem, math.nan, math.nan, [f"not a readable recording: {error!r}"])
    run = REPLAYS.get(recording.method)
    if run is None:
        return Result(recording.case, math.nan, math.nan, [f"unknown method {recording.method!r}"])
    try:
        return run(recording)
    except Exception as error:  # whatever goes wrong in one file must not keep the others from being replayed
        return Result(recording.case, math.nan, math.nan, [f"{type(error).__name__}: {error}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m acclimate.replay", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE", help="recordings (.safetensors)")
    failed = 0
    for path in parser.parse_args(arguments).files:
        result = replay(path)
        failed += bool(result.problems)
        print(result, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
