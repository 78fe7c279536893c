"""The state file: complete, atomic, and refused when it is not what it should be."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import acclimate
from acclimate.core import statefile
from acclimate.errors import ModelError, StateError
from acclimate.testing.check import assert_identical, tiny_model
from support import assert_exact


@pytest.fixture
def saved(tmp_path, batches):
    model = acclimate.adapt(tiny_model(), "dct", lr=0.01)
    for images in batches:
        model(images)
    path = tmp_path / "s.safetensors"
    model.save(path)
    return model, path


def test_the_header_says_what_it_is(saved):
    model, path = saved
    tensors, header = statefile.read(path)
    assert header["method"] == "dct" and header["config"]["lr"] == 0.01
    assert header["steps"] == 4 and header["format"] == 1
    assert set(header["versions"]) == {"acclimate", "torch", "timm"}
    assert header["model"] == {"class": "VisionTransformer", **model.fingerprint()}
    assert not any("qkv" in name or "mlp" in name for name in tensors)  # what changed, not the backbone
    assert_identical(tensors, {**model.state.capture(), **model.state.constants()}, "in the file")


def test_the_fingerprint_is_that_of_the_source(saved):
    model, _ = saved
    fresh = acclimate.adapt(tiny_model(), "tent")
    assert model.fingerprint() == fresh.fingerprint()


def other_weights():
    model = tiny_model()
    with torch.no_grad():
        model.blocks[2].attn.proj.bias[3] += 1e-3
    return model


def other_architecture():
    model = tiny_model()
    model.head = torch.nn.Linear(32, 12)
    return model


@pytest.mark.parametrize(
    ("build", "message"), [(other_weights, "other weights"), (other_architecture, "another architecture")]
)
def test_a_file_of_another_model_is_refused(saved, build, message, batches):
    _, path = saved
    model = build()
    modules, flags = dict(model.named_modules()), [p.requires_grad for p in model.parameters()]
    with pytest.raises(StateError, match=message):
        acclimate.load(path, model)
    assert dict(model.named_modules()) == modules and [p.requires_grad for p in model.parameters()] == flags
    adapter = acclimate.adapt(model, "dct", lr=0.01)
    adapter(batches[0])
    before = adapter.state.capture()
    with pytest.raises(StateError, match=message):
        adapter.load(path)
    assert_identical(adapter.state.capture(), before, "after a refused file")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("sar", {}, "method is 'dct' in the file, 'sar' here"),
        ("dct", {"lr": 0.02}, "lr is 0.01 in the file, 0.02 here"),
        ("dct", {"lr": 0.01, "classes": [1, 2]}, r"classes is None in the file, \[1, 2\] here"),
        ("dct", {"lr": 0.01, "seed": 4}, "seed is 0 in the file, 4 here"),
    ],
)
def test_a_file_of_another_run_is_refused(saved, method, options, message, batches):
    _, path = saved
    adapter = acclimate.adapt(tiny_model(), method, **options)
    adapter(batches[0])
    before = adapter.state.capture()
    with pytest.raises(StateError, match=message):
        adapter.load(path)
    assert_identical(adapter.state.capture(), before, "after a refused file")


def test_an_adapter_continues_from_its_own_file(saved, batches):
    model, path = saved
    other = acclimate.adapt(tiny_model(), "dct", lr=0.01)
    other.load(path)
    assert torch.equal(other(batches[0]), model(batches[0]))


def test_a_wrapped_model_is_refused(saved):
    model, path = saved
    for wrapped in (model, model.model):
        with pytest.raises(ModelError, match="wrapped already"):
            acclimate.load(path, wrapped)


def rewritten(path, change):
    """The same file with another header, its digest made to fit."""
    tensors, header = statefile.read(path)
    change(header)
    text = json.dumps(header, sort_keys=True)
    save_file(tensors, path, {"acclimate": text, "digest": statefile.digest(tensors, text)})
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(format=99), "format version 99"),
        (lambda h: h.update(method="mine"), "not known here.*'mine'"),
        (lambda h: h["config"].update(magic=1), "not known here.*'magic'"),
    ],
)
def test_another_version_or_method_is_refused(saved, change, message):
    _, path = saved
    fresh = tiny_model()
    with pytest.raises(StateError, match=message):
        acclimate.load(rewritten(path, change), fresh)
    acclimate.adapt(fresh, "tent")  # was left unwrapped


def test_missing_tensors_are_refused(saved):
    _, path = saved
    tensors, header = statefile.read(path)
    del tensors["model/blocks.0.norm1.weight"]
    statefile.write(path, tensors, header)
    fresh = tiny_model()
    with pytest.raises(StateError, match=r"blocks\.0\.norm1\.weight is missing"):
        acclimate.load(path, fresh)
    acclimate.adapt(fresh, "tent")


def test_something_else_is_refused(tmp_path):
    weights = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(2)}, weights)
    text = tmp_path / "notes.txt"
    text.write_text("no state here")
    for path, message in (
        (weights, "not a state file of acclimate"),
        (text, "truncated"),
        (tmp_path / "gone", "does not exist"),
    ):
        with pytest.raises(StateError, match=message):
            acclimate.load(path, tiny_model())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(percent=st.integers(0, 99))
def test_a_truncated_file_is_refused(saved, tmp_path, percent):
    _, path = saved
    data = path.read_bytes()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(data[: len(data) * percent // 100])
    with pytest.raises(StateError):
        statefile.read(broken)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(percent=st.integers(0, 99), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(saved, tmp_path, percent, bit):
    _, path = saved
    data = bytearray(path.read_bytes())
    data[len(data) * percent // 100] ^= 1 << bit
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(data)
    try:
        tensors, header = statefile.read(broken)
    except StateError:
        return
    # a flip in the padding or layout of the file's own index may leave the content whole
    good_tensors, good_header = statefile.read(path)
    assert header == good_header
    assert_identical(tensors, good_tensors, "read in spite of a flipped bit")


def test_a_failed_write_leaves_the_old_file(saved, monkeypatch):
    model, path = saved
    before = path.read_bytes()

    def crash(*_):
        raise OSError("disk full")

    for victim in ("replace", "fsync"):
        with monkeypatch.context() as patch, pytest.raises(StateError, match="disk full"):
            patch.setattr(os, victim, crash)
            model.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_write_is_flushed_before_and_after_the_rename(saved, monkeypatch):
    model, path = saved
    events = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noting_replace(a, b):
        events.append("rename")
        replace(a, b)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    model.save(path)
    assert events == ["file", "rename", "folder"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"optimizer/999/momentum_buffer": torch.zeros(3)}), "optimizer/999"),
        (lambda t: t.update({"optimizer/0/momentum_buffer": torch.zeros(3)}), "optimizer/0"),
        (lambda t: t.update(rng=torch.zeros(3, dtype=torch.uint8)), "rng"),
        (lambda t: t.update(surprise=torch.zeros(3)), "surprise"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_whole(saved, change, message):
    model, path = saved
    tensors, header = statefile.read(path)
    change(tensors)
    statefile.write(path, tensors, header)
    before = model.state.capture()
    with pytest.raises(StateError, match=message):
        model.load(path)
    assert_identical(model.state.capture(), before, "after a refused file")
    fresh = tiny_model()
    with pytest.raises(StateError, match=message):
        acclimate.load(path, fresh)
    acclimate.adapt(fresh, "tent")


def test_an_unknown_guard_option_is_refused(saved):
    _, path = saved
    with pytest.raises(StateError, match="not known here"):
        acclimate.load(rewritten(path, lambda h: h["options"]["guard"].update(magic=1)), tiny_model())


@pytest.mark.numerics
def test_the_cost_options_may_differ(saved, batches):
    model, path = saved
    other = acclimate.adapt(tiny_model(), "dct", lr=0.01, micro_batch=3)
    other.load(path)
    assert_exact(other.double()(batches[0]), model.double()(batches[0]))


def test_the_file_is_as_readable_as_any_other(saved, tmp_path):
    _, path = saved
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_frozen_random_generators_travel_with_the_file(tmp_path, batches):
    """Whatever this library version would draw from the seed, the file says what they were."""
    model = acclimate.adapt(tiny_model(), "dct")
    model(batches[0])
    with torch.no_grad():
        model.method.generators["1"].weights["q"].fill_(7)
    model.save(tmp_path / "q.safetensors")
    loaded = acclimate.load(tmp_path / "q.safetensors", tiny_model())
    assert (loaded.method.generators["1"].weights["q"] == 7).all()


def test_a_folder_that_does_not_exist_is_named(saved, tmp_path):
    model, _ = saved
    with pytest.raises(StateError, match="nowhere"):
        model.save(tmp_path / "nowhere" / "s.safetensors")


def test_the_file_is_plain_safetensors(saved):
    _, path = saved
    with safe_open(str(path), "pt") as file:
        assert set(file.metadata()) == {"acclimate", "digest"}


def test_another_file_of_ours_is_refused(tmp_path):
    statefile.write(tmp_path / "source.safetensors", {"head": torch.zeros(2)}, {"kind": "source model"})
    with pytest.raises(StateError, match="not the state of an adapter"):
        acclimate.load(tmp_path / "source.safetensors", tiny_model())
