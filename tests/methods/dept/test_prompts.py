"""Prompts that are trained, interrupted, taken up, written and given to DePT-G."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

import acclimate
from acclimate import cli
from acclimate.core import statefile
from acclimate.core.statistics import SourceStatistics
from acclimate.data.domains import Corrupted
from acclimate.errors import ConfigError, InputError, ModelError, StateError
from acclimate.methods.dept.network import Sizes
from acclimate.methods.dept.training import PromptRecipe, train_prompts
from acclimate.models.loading import CATALOGUE, SourceModel
from coloured import COLOURS, MEAN, STD, Interrupting, domain, new_images, same, write_folder

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = Sizes(stages=2, prompts=3, hidden=12, bottleneck=6, outputs=8)
QUICK = PromptRecipe(epochs=4, batch_size=16, lr=0.3, warmup=2)


def plain():
    torch.manual_seed(3)
    view = VisionTransformer(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=2, num_classes=3)
    view.pretrained_cfg = dict(input_size=(3, 32, 32), mean=MEAN, std=STD)
    return view.eval()


def train(out, data=None, **options):
    options = dict(sizes=SIZES, recipe=QUICK, device="cpu") | options
    return train_prompts(plain(), data or domain(), list(COLOURS), out, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "prompts.safetensors"
    return out, train(out)


def test_it_learns_and_says_what_it_did(trained):
    out, made = trained
    assert made.kinds == ["prompts"] and made.about["samples"] == 54 and made.about["held_out"] == 6
    assert made.about["prompts"] == 3 and made.about["labels"] == "given" and made.about["accuracy"] > 0.8
    assert not list(out.parent.glob("*unfinished"))
    header = statefile.read(out)[1]
    assert header["history"][0][0] > header["history"][-1][0]
    assert header["settings"]["recipe"]["smoothing"] == 0.1 and header["settings"]["images"] == 60
    assert {name.split("/")[1].split(".")[0] for name in load_file(out)} == {"prompts", "head", "dino"}


def test_dept_begins_with_them(trained):
    model = acclimate.adapt(plain(), "dept-g", source_statistics=trained[0], bank=32)
    images = Corrupted(new_images(8), "gaussian_noise", 2, mean=MEAN, std=STD)
    labels = torch.from_numpy(images.labels)
    right = (model(images.load(np.arange(len(labels)))).argmax(-1) == labels).float().mean()
    assert right >= 0.8 and model.record.used == len(labels)


@pytest.mark.parametrize(
    ("about", "tensors"),
    [
        ({"hidden": 10**12}, {}),
        ({"prompts": 10**7}, {}),
        ({"stages": "2"}, {}),
        ({"stages": 7}, {}),
        ({"outputs": -8}, {}),
        ({"outputs": [8]}, {}),
        ({"outputs": float("inf")}, {}),
        ({"samples": None}, {}),
        ({}, {"prompts/prompts.0": torch.full((3, 24), float("nan"))}),
        ({}, {"prompts/prompts.0": torch.zeros(3, 24, dtype=torch.complex64)}),
        ({}, {"prompts/prompts.0": torch.zeros(4, 24)}),
        ({}, {"prompts/more": torch.zeros(4, 24)}),
    ],
    ids=lambda lie: str(lie)[:60],
)
def test_forged_prompts_are_refused(trained, tmp_path, about, tensors):
    honest, header = statefile.read(trained[0])
    file, model = tmp_path / "forged.safetensors", plain()
    statefile.write(file, {**honest, **tensors}, {**header, "about": {**header["about"], **about}})
    with pytest.raises(StateError, match="forged"):
        acclimate.adapt(model, "dept-g", source_statistics=file, bank=32)
    acclimate.adapt(model, "dept-g", source_statistics=trained[0], bank=32)


def test_the_model_is_left_as_it_was(tmp_path):
    model = plain().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    train_prompts(model, domain(), list(COLOURS), tmp_path / "p.safetensors", sizes=SIZES, recipe=QUICK, device="cpu")
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_interrupted_it_goes_on_and_ends_with_the_same_weights(trained, tmp_path):
    out = tmp_path / "prompts.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(out, Interrupting(8))  # in the second of four epochs
    assert not out.exists() and (tmp_path / "prompts.safetensors.unfinished").exists()
    with pytest.raises(StateError, match=r"another training: seed was 0, now 1.*--fresh"):
        train(out, seed=1)
    train(out)
    assert same(out, trained[0]) and [file.name for file in tmp_path.iterdir()] == [out.name]
    assert train(out, Interrupting(1)).about == trained[1].about  # finished: nothing is loaded
    with pytest.raises(KeyboardInterrupt):
        train(out, Interrupting(1), fresh=True)


def test_the_teacher_grows_warmer():
    recipe = PromptRecipe()
    assert [recipe.temperature(epoch) for epoch in range(5)] == pytest.approx([0.04, 0.055, 0.07, 0.07, 0.07])
    assert PromptRecipe(warm_epochs=1).temperature(0) == 0.07


def test_what_cannot_be_trained_is_refused(tmp_path):
    out = tmp_path / "p.safetensors"
    with pytest.raises(InputError, match="2 classes, the model's head 3"):
        train_prompts(plain(), domain(), ["blue", "red"], out)
    with pytest.raises(ModelError, match="wrapped"):
        train_prompts(acclimate.adapt(plain(), "source"), domain(), list(COLOURS), out)
    with pytest.raises(ConfigError, match=r"\.safetensors"):
        train(tmp_path / "p.bin")
    with pytest.raises(ConfigError, match="stages=9"):
        train(out, sizes=Sizes(stages=9))
    for wrong in ({"epochs": 0}, {"lr": -1}, {"warmup": 0.5}, {"area": 2}, {"first_temperature": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            PromptRecipe(**wrong)
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path, monkeypatch, capsys):
    root = write_folder(tmp_path / "photos")
    mine = SourceModel("mine", plain)
    monkeypatch.setitem(CATALOGUE, "mine", lambda: mine)
    out = tmp_path / "p.safetensors"
    sizes = ["--stages", "2", "--prompts", "2", "--hidden", "8", "--bottleneck", "4", "--outputs", "6"]
    given = ["train-prompts", "--model", "mine", "--data", "folder", "--root", str(root), "--out", str(out), "--epochs", "1"]
    assert cli.main([*given, *sizes, "--workers", "0", "--device", "cpu"]) == 0
    assert "images held out" in capsys.readouterr().out
    assert SourceStatistics.load(out).about["outputs"] == 6
    assert (
        cli.main([*given, "--workers", "0", "--device", "cpu"]) == 2 and "sizes.bottleneck was 4" in capsys.readouterr().err
    )
