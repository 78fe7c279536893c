"""`acclimate analyze`: its arguments are those of the bench and of each figure, and no others."""

from __future__ import annotations

import argparse
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from acclimate.analysis.registry import figure_kinds, figure_titles
from acclimate.cli import build_parser
from acclimate.errors import AcclimateError, ConfigError


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["analyze", *words])


def run(*words: str) -> None:
    given = parsed(*words)
    given.run(given)


def write_images(folder, names, side=40):
    rng = np.random.default_rng(0)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(folder / name)


@pytest.fixture
def seen(monkeypatch):
    """Note what figures are asked to draw, and draw nothing."""
    calls = []
    for kind in figure_kinds():
        monkeypatch.setitem(
            vars(kind), "draw", lambda subject, name=kind.name, **options: calls.append((name, subject, options)) or []
        )
    return calls


@pytest.mark.parametrize("words", [["--help"], ["rolout"]])
def test_the_list_of_figures_does_not_need_torch(words):
    code = f"""
import sys
from acclimate.cli import main
try:
    main(["analyze", *{words!r}])
finally:
    print("torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip().endswith("False") and "rollout" in out.stdout + out.stderr


def test_the_list_of_figures_is_that_of_the_figures():
    assert figure_titles() == {kind.name: kind.help for kind in figure_kinds()}
    assert list(figure_titles()) == [kind.name for kind in figure_kinds()]


def test_every_figure_gets_its_arguments_or_their_defaults(seen):
    run("all", "--images", "20", "--severity", "3", "--rows", "2")
    options = {name: given for name, _, given in seen}
    assert list(options) == [kind.name for kind in figure_kinds()]
    assert options["rollout"] == dict(corruption="defocus_blur", method="dct", rows=2, severity=3, seed=0)
    assert options["attention-distance"] == dict(corruption="defocus_blur", method="dct", severity=3, seed=0)
    assert options["cost"] == dict(corruption="gaussian_noise", severity=3, seed=0)
    assert options["ablation"]["corruptions"][-1] == "fog" and seen[0][1].count == 20


@pytest.mark.parametrize(
    "words",
    [
        ("tsne", "--rows", "3"),
        ("cost", "--method", "dct"),
        ("ablation", "--clean", "x"),
        ("sensitivity", "--rows", "3"),
    ],
)
def test_an_argument_without_a_use_is_refused(words):
    with pytest.raises(ConfigError, match="unrecognized argument"):
        parsed(*words)


def test_lists_are_read(seen):
    run("tsne", "--images", "10", "--corruptions", "fog, snow")
    assert seen[0][2]["corruptions"] == ["fog", "snow"]
    with pytest.raises(ConfigError, match="each once"):
        parsed("tsne", "--corruptions", "fog,fog")


def test_a_folder_without_classes_is_enough_for_some_figures(seen, tmp_path):
    write_images(tmp_path, ["a.png", "b.png"])
    run("rollout", "--data", "folder", "--root", str(tmp_path))
    subject = seen[0][1]
    assert subject.count == 2 and not subject.labelled and subject.testbed.name == "bundled"
    assert subject.data.domains[0].key == ("defocus_blur", 5)
    with pytest.raises(AcclimateError, match="each class needs one"):
        run("ablation", "--data", "folder", "--root", str(tmp_path))
    with pytest.raises(AcclimateError, match="images=3"):
        run("rollout", "--data", "folder", "--root", str(tmp_path), "--images", "3")


def test_a_data_set_on_disk_needs_no_more_than_the_figure(seen, tmp_path):
    """Of ImageNet-C, one corruption, with clean images from elsewhere."""
    write_images(tmp_path / "imagenet-c", [f"fog/5/n01440764/{i}.JPEG" for i in range(3)], side=224)
    write_images(tmp_path / "val", [f"n01440764/{i}.JPEG" for i in range(3)], side=300)
    words = ["rollout", "--model", "vit_tiny_patch16_224", "--data", "imagenet-c", "--root", str(tmp_path / "imagenet-c")]
    with pytest.MonkeyPatch.context() as patch:
        import timm

        real = timm.create_model
        patch.setattr(timm, "create_model", lambda name, **more: real(name, **{**more, "pretrained": False}))
        run(*words, "--partial", "--corruption", "fog")
        run(*words, "--partial", "--corruption", "fog", "--clean", str(tmp_path / "val"))
    without, subject = (call[1] for call in seen)
    with pytest.raises(AcclimateError, match="imagenet-c has no clean images"):
        without.batch()
    assert subject.batch().shape == subject.batch("fog").shape == (3, 3, 224, 224)


def test_a_figure_is_saved_and_told(tmp_path, capsys):
    run("rollout", "--images", "12", "--rows", "2", "--method", "tent", "--out", str(tmp_path))
    told = capsys.readouterr().out
    assert "rollout.png" in told and "Over 12 images" in told and "too few images or steps to say" in told
    assert "holds here" not in told
    assert {path.suffix for path in tmp_path.glob("rollout.*")} == {".png", ".svg", ".csv", ".json"}
