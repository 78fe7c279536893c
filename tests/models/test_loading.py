"""Models by name: folders of transformers, own weights of timm models, and which methods suit them."""

from __future__ import annotations

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

from acclimate import cli
from acclimate.data.preprocess import input_of
from acclimate.errors import ConfigError, ModelError, StateError
from acclimate.models.families import view_of
from acclimate.models.loading import create_timm, load_model
from acclimate.testing.zoo import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that transformers wrote, with an image processor."""
    transformers = pytest.importorskip("transformers")
    where = tmp_path_factory.mktemp("models") / "deit"
    tiny("HF DeiT").save_pretrained(where)
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessor(size=size, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]).save_pretrained(where)
    return where


def test_a_folder_of_transformers_is_a_model_with_its_normalisation(folder):
    model = load_model(str(folder))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images).logits, tiny("HF DeiT").eval()(images).logits)
    found = input_of(model)
    assert (found.size, found.mean, found.std, found.classes) == (32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 10)


def test_a_folder_without_a_processor_does_not_say_how_images_are_normalised(tmp_path):
    pytest.importorskip("transformers")
    tiny("HF ConvNeXt").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does not say how its images are normalised"):
        input_of(load_model(str(tmp_path)))
    assert input_of(load_model(str(tmp_path)), mean=[0.5] * 3, std=[0.5] * 3).size == 32


def test_a_model_of_timm_in_transformers_has_its_normalisation(tmp_path):
    transformers = pytest.importorskip("transformers")
    told = {"input_size": [3, 64, 64], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.9}
    config = transformers.TimmWrapperConfig(architecture="test_resnet", num_labels=10)
    transformers.TimmWrapperForImageClassification(config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "pretrained_cfg": told}))
    found = input_of(load_model(str(tmp_path)))
    assert (found.size, found.mean, found.std, found.classes) == (64, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 10)


def test_a_folder_that_holds_no_model_is_named(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded as an image classifier of transformers"):
        load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="has weights of its own"):
        load_model(str(tmp_path), weights="some.safetensors")


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "vit_tiny_patch16_224"])
def test_the_head_has_as_many_classes_as_the_weights(name, tmp_path):
    trained = timm.create_model(name, num_classes=7).eval()
    save_file(trained.state_dict(), tmp_path / "own.safetensors")
    model = load_model(name, weights=tmp_path / "own.safetensors")
    assert view_of(model).classes == 7
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), trained.state_dict().values(), strict=True))
    other = create_timm(name, weights=tmp_path / "own.safetensors", num_classes=5)  # a new head, to be trained
    assert view_of(other).classes == 5


@pytest.mark.parametrize("prefix", ["module.", "model."], ids=["DataParallel", "Lightning"])
def test_weights_of_a_module_that_contains_the_model_are_taken(prefix, tmp_path):
    trained = timm.create_model("test_resnet", num_classes=7)
    weights = {prefix + key: value for key, value in trained.state_dict().items()}
    torch.save({"state_dict": weights, "epoch": 3}, tmp_path / "own.ckpt")
    model = load_model("test_resnet", weights=tmp_path / "own.ckpt")
    assert view_of(model).classes == 7 and torch.equal(model.fc.weight, trained.fc.weight)


def test_a_file_of_weights_is_no_model(tmp_path):
    trained = timm.create_model("test_resnet")
    torch.save(trained.state_dict(), tmp_path / "own.pth")
    save_file(trained.state_dict(), tmp_path / "own.safetensors")
    with pytest.raises(ConfigError, match=r"own\.pth is a file, and no name of a model.*--model NAME --weights FILE"):
        load_model(str(tmp_path / "own.pth"))
    with pytest.raises(StateError, match=r"not a state file of acclimate.*--model NAME --weights FILE"):
        load_model(str(tmp_path / "own.safetensors"))
    torch.save(trained, tmp_path / "whole.pth")
    with pytest.raises(ModelError, match=r"cannot be read as weights.*torch\.save\(model\.state_dict"):
        load_model("test_resnet", weights=tmp_path / "whole.pth")


def test_a_backbone_without_a_trained_head_is_refused(tmp_path):
    pytest.importorskip("transformers")
    tiny("HF ViT").vit.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no weights for classifier\.bias, classifier\.weight of a ViTFor.*zero_shot"):
        load_model(str(tmp_path))


def test_weights_of_another_model_are_refused(tmp_path):
    save_file(timm.create_model("test_convnext").state_dict(), tmp_path / "own.safetensors")
    with pytest.raises(ModelError, match=r"is not of this model: .* missing, unknown or of another shape"):
        load_model("test_resnet", weights=tmp_path / "own.safetensors")


def test_the_command_tells_which_methods_suit_a_model(folder, capsys):
    assert cli.main(["methods", "--model", "test_resnet"]) == 0
    out = capsys.readouterr().out
    assert (
        "BatchNorm layers with the statistics of the source data" in out
        and "methods suit it: source, tent, sar, keel" in out
    )
    assert "dct needs self-attention over all tokens of an image and a class token." in out
    assert cli.main(["methods", "--model", str(folder)]) == 0
    assert "norm needs BatchNorm layers" in capsys.readouterr().out
    assert cli.main(["methods", "--model", "resnet5O"]) == 2
    assert "Did you mean 'resnet50'?" in capsys.readouterr().err
    assert cli.main(["methods", "tent", "--model", "test_resnet"]) == 2
    assert "and not both" in capsys.readouterr().err
