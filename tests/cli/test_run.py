"""The command that adapts to a folder without labels."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import acclimate
from acclimate import cli
from acclimate.data.labels import class_names
from acclimate.data.preprocess import Preprocess
from acclimate.evaluation.predictions import predictions, unlabelled
from acclimate.models.loading import load_model
from acclimate.testing.zoo import tiny


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(7):
        file = tmp_path / "photos" / ("day" if i % 2 else "") / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (48, 40, 3), np.uint8)).save(file)
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    return tmp_path / "photos"


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    model = tiny("ResNet")
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    return str(tmp_path / "own.safetensors")


def read(file):
    with open(file, newline="") as text:
        return list(csv.DictReader(text))


def run(*arguments):
    return cli.main(["run", "--device", "cpu", *map(str, arguments)])


def test_a_folder_is_predicted_and_the_state_saved(photos, weights, tmp_path, capsys):
    common = ("--model", "test_resnet", "--weights", weights, "--root", photos, "--batch-size", 3)
    out, state = tmp_path / "made" / "out.csv", tmp_path / "state.safetensors"
    assert run(*common, "--method", "tent:lr=0.01", "--predictions", out, "--save", state) == 0
    assert "7 images predicted in 3 steps of tent" in capsys.readouterr().out
    rows = read(out)
    assert [row["file"] for row in rows] == ["0.png", "2.png", "4.png", "6.png", "day/1.png", "day/3.png", "day/5.png"]
    model = load_model("test_resnet", weights=weights)
    adapter = acclimate.adapt(model, "tent", lr=0.01)
    expected = list(predictions(adapter, unlabelled(photos, Preprocess.for_model(model)), batch_size=3))
    assert [(int(row["label"]), row["probability"]) for row in rows] == [(p.label, f"{p.probability:.6f}") for p in expected]
    # continue as the same adapter would
    assert run(*common, "--load", state, "--predictions", out) == 0
    again = list(predictions(adapter, unlabelled(photos, Preprocess.for_model(model)), batch_size=3))
    assert [row["probability"] for row in read(out)] == [f"{p.probability:.6f}" for p in again]


def test_what_cannot_be_run_is_named(photos, weights, tmp_path, capsys):
    common = ("--model", "test_resnet", "--weights", weights, "--predictions", tmp_path / "out.csv")
    (tmp_path / "empty").mkdir()
    assert run(*common, "--root", tmp_path / "empty") == 2
    assert "there are no images" in capsys.readouterr().err
    assert run(*common, "--root", photos, "--method", "dct") == 2
    assert "dct needs self-attention" in capsys.readouterr().err
    assert run(*common, "--root", photos, "--method", "tent", "--load", weights) == 2
    assert "leave out --method" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()


def test_names_of_classes_are_those_that_a_model_says():
    assert class_names(acclimate.bundled.model())[0] == "t-shirt"
    assert list(class_names(tiny("ResNet"))) == []
    pytest.importorskip("transformers")
    assert class_names(tiny("HF ConvNeXt"))[3] == "LABEL_3"
