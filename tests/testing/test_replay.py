"""Recordings of the reference implementations replay, and a wrong implementation does not."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import acclimate
from acclimate.core.engine import entropy
from acclimate.methods.rem import REM
from acclimate.methods.sar import SAR
from acclimate.testing import replay
from acclimate.testing.check import tiny_batches, tiny_model
from acclimate.testing.replay import _entropies
from support import GOLDEN, shared_golden


def method_of(path):
    with safe_open(str(path), "pt") as file:
        return (file.metadata() or {}).get("method")


def write(folder, case, tensors, **metadata):
    """Write a recording with the metadata of another one, but for those given, and return its path."""
    with safe_open(str(GOLDEN / f"{case}.safetensors"), "pt") as file:
        old = file.metadata()
    path = str(folder / "altered.safetensors")
    save_file(tensors, path, {**old, **metadata})
    return path


@pytest.mark.numerics
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.safetensors")), ids=lambda path: path.stem)
def test_golden(path):
    result = replay.replay(path)
    assert not result.problems, str(result)


def test_golden_files_are_there():
    assert len(list(GOLDEN.glob("*.safetensors"))) >= 7


def test_shared_golden():
    files = [path for path in shared_golden() if method_of(path) in replay.REPLAYS]
    if not files:
        pytest.skip("no folder of further recordings beside the project (set ACCLIMATE_GOLDEN)")
    results = [replay.replay(path) for path in files]
    assert not [str(result) for result in results if result.problems]


def test_the_default_fidelity_is_not_the_reference(monkeypatch):
    """The recordings tell the two apart, so passing them means something."""
    run = replay.adapt
    monkeypatch.setattr(replay, "adapt", lambda *a, **k: run(*a, **{**k, "reference": False}))
    for case in ("sar_reset", "sar_empty", "dct_deep"):
        assert replay.replay(GOLDEN / f"{case}.safetensors").problems


def test_a_small_mistake_is_found(monkeypatch):
    monkeypatch.setattr(SAR, "norm_lr", lambda self, batch_size: self.lr * 1.02)
    assert "off by" in str(replay.replay(GOLDEN / "dct_bs1.safetensors"))


def test_a_run_may_begin_frozen(tmp_path):
    """As in an evaluation of the source model. The recorded steps follow, one later."""
    recording = replay.Recording(GOLDEN / "neo_continual_bs1.safetensors")
    later = {f"{kind}/{t + 1}": recording.tensors[f"{kind}/{t}"] for kind in ("x", "logits") for t in range(12)}
    first = {"x/0": recording.tensors["x/0"].clone(), "logits/0": recording.model()(recording.tensors["x/0"]).detach()}
    centre = recording.tensors["trace/center"]
    trace = {"trace/center": torch.cat([torch.zeros_like(centre[:1]), centre])}
    hyper = json.dumps({**recording.hyper, "adapt": [0] + 12 * [1]})
    path = write(tmp_path, "neo_continual_bs1", {**recording.tensors, **later, **first, **trace}, hyper=hyper)
    result = replay.replay(path)
    assert not result.problems, str(result)


@pytest.mark.parametrize(("method", "name"), [("eta", "model_probs"), ("delta", "qhat")])
def test_averages_are_of_the_classes_of_the_target(method, name):
    model = acclimate.adapt(tiny_model(), method, classes=[0, 3, 5], reference=True)
    observe = {"model_probs": _entropies._average, "qhat": _entropies._shares}[name]
    values = observe(model, model(tiny_batches(1)[0]))[name]
    assert len(values) == 3 and sum(values) == pytest.approx(1)


@pytest.mark.parametrize("missing", [float("nan"), -1.0])
def test_a_short_last_batch_replays(tmp_path, missing):
    """Whatever is recorded in the places of the samples that it lacks."""
    recording = replay.Recording(GOLDEN / "rem_bs1.safetensors")
    entropies = torch.full((2, 3, 4), missing)

    class Noting(REM):
        def ranked(self, *views):
            step = int(len(views[0]) < 4)
            entropies[step, :, : len(views[0])] = torch.stack([entropy(view).detach() for view in views])
            return super().ranked(*views)

    model = acclimate.adapt(recording.model(), Noting, reference=True, micro_batch=4, lr=recording.hyper["lr"])
    images = torch.cat([recording.tensors[f"x/{t}"] for t in range(6)])
    x = {f"x/{t}": batch.clone() for t, batch in enumerate(images.split(4))}
    logits = {name.replace("x", "logits"): model(batch) for name, batch in x.items()}
    final = {f"final/{name}": p for name, p in replay.adapted_parameters(model).items() if "momentum" not in name}
    weights = {name: t for name, t in recording.tensors.items() if name.startswith("model/")}
    for wrong in (0.0, 1.0):
        entropies[1, 0, 1] += wrong
        path = write(tmp_path, "rem_bs1", {**weights, **x, **logits, **final, "trace/entropy": entropies})
        assert len(replay.replay(path).problems) == wrong


def test_the_region_of_recap_may_be_in_another_unit(tmp_path):
    recording = replay.Recording(GOLDEN / "recap_bs1.safetensors")
    twice = {name: 2 * recording.hyper[name] for name in ("tau", "scale")}
    path = write(tmp_path, "recap_bs1", recording.tensors, hyper=json.dumps({**recording.hyper, **twice}))
    assert not replay.replay(path).problems


def test_the_views_of_an_image_serve_all_its_iterations(tmp_path):
    recording = replay.Recording(GOLDEN / "tent_normal.safetensors")
    images, views = (recording.tensors[f"x/{t}"] for t in range(2))
    tensors = {name: t for name, t in recording.tensors.items() if name.startswith("model/")}
    for t in range(2):
        model = recording.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            mean = model(views[4 * t : 4 * t + 4]).log_softmax(-1).logsumexp(0) - math.log(4)
            entropy(mean[None]).sum().backward()
            optimizer.step()
        x = images[t : t + 1].clone()
        tensors |= {f"x/{t}": x, f"extra/views/{t}": views[4 * t : 4 * t + 4].clone(), f"logits/{t}": model(x).detach()}
    tensors |= {f"final/{name}": p.detach() for name, p in model.named_parameters()}
    hyper = {"lr": 0.001, "weight_decay": 0.01, "niter": 2, "n_views": 4, "leak_optimizer_state": False}
    result = replay.replay(write(tmp_path, "tent_normal", tensors, method="MEMO", hyper=json.dumps(hyper)))
    assert not result.problems, str(result)


def altered(tmp_path, **metadata):
    return write(tmp_path, "tent_normal", replay.Recording(GOLDEN / "tent_normal.safetensors").tensors, **metadata)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"method": "MAGIC"}, "unknown method 'MAGIC'"),
        ({"hyper": '{"lr": 0.01, "steps": 2}'}, "steps=2 is not supported"),
        ({"hyper": '{"lr": 0.01, "magic": 2}'}, "magic=2 is not supported"),
        ({"hyper": '{"lr": 0.011, "momentum": 0.9, "batch_size": 8}'}, "off by"),
        ({"tolerance_final": "1e-12"}, "tolerance 1e-12"),
    ],
)
def test_what_cannot_be_replayed_fails(tmp_path, capsys, metadata, message):
    good = str(GOLDEN / "tent_normal.safetensors")
    assert replay.main([altered(tmp_path, **metadata), good]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and message in lines[0] and lines[1].endswith("pass")


def test_an_unreadable_file_fails(tmp_path, capsys):
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    assert replay.main([str(tmp_path / "noise.safetensors"), str(tmp_path / "gone.safetensors")]) == 1
    assert capsys.readouterr().out.count("not a readable recording") == 2


def test_all_good_files_exit_with_zero(capsys):
    assert replay.main([str(GOLDEN / "tent_normal.safetensors")]) == 0
    assert capsys.readouterr().out.startswith("tent_normal")
