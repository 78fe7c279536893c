"""Recordings of the reference implementations replay, and a wrong implementation does not."""

from __future__ import annotations

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from acclimate.methods.sar import SAR
from acclimate.testing import replay
from support import GOLDEN, shared_golden


def method_of(path):
    with safe_open(str(path), "pt") as file:
        return (file.metadata() or {}).get("method")


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


def altered(tmp_path, **metadata):
    with safe_open(str(GOLDEN / "tent_normal.safetensors"), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        old = file.metadata()
    save_file(tensors, tmp_path / "altered.safetensors", {**old, **metadata})
    return str(tmp_path / "altered.safetensors")


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
