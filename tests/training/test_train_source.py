"""A source model that is trained, interrupted, killed, taken up, written and read back."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.data import resolve_model_data_config
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer, _cfg, build_model_with_cfg, generate_default_cfgs

from acclimate.cli import train_source as command
from acclimate.core import statefile
from acclimate.data.catalog import open_data
from acclimate.data.domains import Corrupted
from acclimate.data.preprocess import Preprocess, input_of
from acclimate.errors import ConfigError, InputError, ModelError, NonFiniteError, StateError
from acclimate.models.loading import load_model, load_source
from acclimate.training.loop import augmented, relative_lr, split
from acclimate.training.source_model import MODEL, Recipe, train_source
from coloured import COLOURS, MEAN, STD, Interrupting, domain, new_images, same, write_folder
from support import assert_exact

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "vit_of_these_tests"
QUICK = Recipe(epochs=4, batch_size=16, head_lr=0.1, backbone_lr=0.02)
default_cfgs = generate_default_cfgs({f"{NAME}.tag": _cfg(mean=MEAN, std=STD, input_size=(3, 32, 32), crop_pct=1.0)})


@register_model
def vit_of_these_tests(pretrained=False, **options):
    shape = dict(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=2)
    return build_model_with_cfg(VisionTransformer, NAME, pretrained, **shape | options)


def train(out, data=None, **options):
    options = dict(model=NAME, pretrained=False, recipe=QUICK, device="cpu") | options
    return train_source(data or domain(), list(COLOURS), out, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "source.safetensors"
    return out, train(out)


@pytest.fixture
def root(tmp_path):
    return write_folder(tmp_path / "photos")


# Training


def test_it_learns_and_says_what_it_did(trained):
    out, outcome = trained
    assert outcome.accuracy > 0.8 and outcome.held_out == 6 and not outcome.found
    assert not list(out.parent.glob("*unfinished"))
    header = statefile.read(out)[1]
    assert header["accuracy"] == outcome.accuracy and header["num_classes"] == 3 and len(header["history"]) == QUICK.epochs
    assert header["history"][0][0] > header["history"][-1][0]
    settings = header["settings"]
    assert settings["model"] == f"{NAME}.tag" and settings["weights"] == "random" and settings["classes"] == list(COLOURS)
    assert settings["mean"] == list(MEAN) and settings["std"] == list(STD) and settings["seed"] == 0
    assert settings["recipe"]["by"] == "acclimate" and settings["recipe"]["epochs"] == 4 and settings["images"] == 60
    assert header["versions"]["timm"] == timm.__version__


def test_a_network_with_batch_norm_is_trained_and_loaded(tmp_path):
    data = Corrupted(new_images(), mean=(0.5,) * 3, std=(0.5,) * 3)
    train(tmp_path / "a.safetensors", data, model="test_resnet", recipe=Recipe(epochs=1, batch_size=16))
    model = load_source(tmp_path / "a.safetensors")
    tensors = statefile.read(tmp_path / "a.safetensors")[0]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert model.bn1.running_mean.abs().sum() > 0


def test_the_same_seed_gives_the_same_weights_and_leaves_torch_as_it_was(trained, tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train(tmp_path / "again.safetensors")
    assert torch.equal(torch.get_rng_state(), before) and not torch.are_deterministic_algorithms_enabled()
    assert same(trained[0], tmp_path / "again.safetensors")
    train(tmp_path / "other.safetensors", seed=1)
    assert not same(trained[0], tmp_path / "other.safetensors")


def test_workers_do_not_change_the_weights(tmp_path):
    recipe = Recipe(epochs=1, batch_size=32)
    for workers in (0, 2):
        train(tmp_path / f"{workers}.safetensors", recipe=recipe, workers=workers)
    assert same(tmp_path / "0.safetensors", tmp_path / "2.safetensors")


# An epoch asks for images four times to train, and once for those held out


@pytest.mark.parametrize(("request_number", "epochs_done"), [(1, 0), (3, 0), (5, 0), (6, 1), (13, 2), (20, 3)])
def test_an_interrupted_training_ends_with_the_same_weights(trained, tmp_path, request_number, epochs_done):
    out = tmp_path / "source.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(out, Interrupting(request_number))
    assert not out.exists() and not torch.are_deterministic_algorithms_enabled()
    shown = io.StringIO()
    train(out, console=Console(file=shown))
    assert f"going on after epoch {epochs_done} of 4" in shown.getvalue().replace("\n", " ")
    assert len([line for line in shown.getvalue().splitlines() if "held out" in line]) == 4 - epochs_done
    assert same(trained[0], out) and statefile.read(out)[1] == statefile.read(trained[0])[1]
    assert [file.name for file in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize("writes", range(1, 7))
def test_a_training_that_stops_while_writing_ends_with_the_same_weights(trained, tmp_path, monkeypatch, writes):
    """The first checkpoint, one for each epoch, and the result: each appears whole or not at all."""
    out, replace, left = tmp_path / "source.safetensors", os.replace, [writes]

    def stopping(source, target):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(out)
    monkeypatch.undo()
    assert not out.exists()
    train(out)
    assert same(trained[0], out)


def test_a_killed_command_goes_on(root, tmp_path):
    """By kill -9, in a process of its own, as soon as there is an epoch to go on from."""
    out, whole = tmp_path / "killed.safetensors", tmp_path / "whole.safetensors"
    half = tmp_path / "killed.safetensors.unfinished"
    given = arguments(root, out, "--epochs", "30")
    code = f"import torch; torch.set_num_threads(1); import test_train_source as t; t.run({given!r})"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths})
    try:
        while not (half.exists() and statefile.read(half)[1]["history"]):
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL and not out.exists()
    assert 0 < len(statefile.read(half)[1]["history"]) < 30
    run(given)
    run(arguments(root, whole, "--epochs", "30"))
    assert same(out, whole)


def test_what_is_finished_is_not_trained_again(trained, tmp_path):
    out = tmp_path / "source.safetensors"
    out.write_bytes(trained[0].read_bytes())
    (tmp_path / "source.safetensors.unfinished").touch()  # killed after the last write
    assert train(out, Interrupting(1)) == trained[1]._replace(found=True)
    assert [file.name for file in tmp_path.iterdir()] == [out.name]
    with pytest.raises(KeyboardInterrupt):
        train(out, Interrupting(1), fresh=True)
    assert not out.exists()
    train(out)
    assert same(trained[0], out)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (dict(seed=7), "seed was 0, now 7"),
        (dict(recipe=Recipe(epochs=9, batch_size=16, head_lr=0.1, backbone_lr=0.02)), "recipe.epochs was 4, now 9"),
        (dict(data=domain(19)), "images was 60, now 57"),
        (dict(autocast=True), "autocast was false, now true"),
        (dict(pretrained=True), 'weights was "random", now "timm\'s"'),
    ],
)
def test_other_settings_are_refused_by_name(trained, tmp_path, options, difference):
    out = tmp_path / "source.safetensors"
    with pytest.raises(StateError, match=difference):
        train(trained[0], **options)
    with pytest.raises(KeyboardInterrupt):
        train(out, Interrupting(1))
    with pytest.raises(StateError, match=difference):
        train(out, **options)


def test_fresh_does_not_overwrite_what_is_something_else(tmp_path):
    out = tmp_path / "weights.safetensors"
    save_file({"head.bias": torch.zeros(3)}, out)
    content = out.read_bytes()
    for fresh in (False, True):
        with pytest.raises(StateError, match="not a state file of acclimate"):
            train(out, fresh=fresh)
    assert out.read_bytes() == content


# What it starts from


def test_local_weights_with_another_head(tmp_path):
    torch.manual_seed(5)
    start = timm.create_model(NAME, num_classes=7)
    save_file(start.state_dict(), tmp_path / "start.safetensors")
    torch.save(start.state_dict(), tmp_path / "start.pth")
    still = Recipe(epochs=1, batch_size=60, head_lr=0.1, backbone_lr=0)
    for kind in ("safetensors", "pth"):
        out = tmp_path / f"{kind}.safetensors"
        train(out, pretrained=True, weights=tmp_path / f"start.{kind}", recipe=still)
        ours = load_file(out)
        assert all(torch.equal(ours[name], tensor) for name, tensor in start.state_dict().items() if "head" not in name)
        assert ours["head.weight"].shape == (3, 24) and ours["head.weight"].any()
        assert statefile.read(out)[1]["settings"]["weights"].startswith("file ")


def test_weights_that_cannot_be_had(tmp_path, monkeypatch):
    def offline(*_, **__):
        raise OSError("no connection")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", offline)
    with pytest.raises(ModelError, match=r"no connection.*--weights FILE"):
        train_source(Corrupted(new_images(), mean=(0.5,) * 3, std=(0.5,) * 3), list(COLOURS), tmp_path / "a.safetensors",
                     model="test_vit")  # fmt: skip
    with pytest.raises(InputError, match=r"absent\.pth cannot be read"):
        train(tmp_path / "a.safetensors", pretrained=True, weights=tmp_path / "absent.pth")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(model="vit_of_this_tests"), ConfigError, NAME),
        (dict(model="test_vit.r16_in1k"), ConfigError, "test_vit.r160_in1k"),
        (dict(weights="a.pth"), ConfigError, "leave out one"),
        (dict(out="model.pt"), ConfigError, r"ends in \.safetensors"),
        (dict(out="absent/model.safetensors"), StateError, "Cannot write"),
        (dict(device="cuda:99"), ConfigError, "cuda:99"),
        (dict(seed=-1), ConfigError, "seed=-1"),
        (dict(data=domain(1)), InputError, "blue has 1, green has 1, red has 1"),
        (dict(data=domain(mean=STD)), InputError, "normalised with mean .0.2, 0.3, 0.4., but the model expects .0.5"),
        (
            dict(recipe=Recipe(epochs=1, batch_size=8, head_lr=1e38, backbone_lr=1e38)),
            NonFiniteError,
            "lower learning rates",
        ),
    ],
)
def test_what_cannot_be_trained(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        train(tmp_path / options.pop("out", "a.safetensors"), **options)
    assert not (tmp_path / "a.safetensors").exists()


def test_classes_that_cannot_be_told_apart():
    for names, message in ((["all"], "nothing to tell apart"), (["a", "b"], "labels from 0 to 2 for 2 classes")):
        with pytest.raises(InputError, match=message):
            split(domain(), names, 0.1, 0)
    with pytest.raises(InputError, match="grey has 0"):
        split(domain(), [*COLOURS, "grey"], 0.1, 0)
    with pytest.raises(ConfigError, match="epochs=0"):
        Recipe(epochs=0)


# Its parts


def test_a_share_of_every_class_is_held_out():
    train_on, held_out = split(domain(25), list(COLOURS), 0.1, seed=4)
    assert np.bincount(held_out.labels).tolist() == [2, 2, 2] and len(train_on.labels) == 69
    everything = np.concatenate([part.load(np.arange(len(part.labels))) for part in (train_on, held_out)])
    assert len(np.unique(everything.reshape(75, -1), axis=0)) == 75
    again, other = (split(domain(25), list(COLOURS), 0.1, seed)[1].identity for seed in (4, 5))
    assert again == held_out.identity != other


def test_crops_lie_within_the_image_and_half_are_flipped():
    along = torch.linspace(-1, 1, 64, dtype=torch.float64)
    image = torch.stack([along.expand(64, 64), along[:, None].expand(64, 64), torch.ones(64, 64)])
    cut = augmented(image.repeat(400, 1, 1, 1), np.random.RandomState(0), 0.5, 4 / 3)
    assert_exact(cut[:, 2], torch.ones_like(cut[:, 2]))
    width, height = (cut[:, 0, 0, -1] - cut[:, 0, 0, 0]) / 2, (cut[:, 1, -1, 0] - cut[:, 1, 0, 0]) / 2
    assert 0.4 < (width < 0).double().mean() < 0.6 and (height > 0).all()
    area, stretch = width.abs() * height, width.abs() / height
    assert 0.48 < area.min() < 0.55 and 0.9 < area.max() <= 1.001 and stretch.min() > 0.74 and stretch.max() < 1.35
    whole = augmented(image[None], np.random.RandomState(0), 1, 1)
    assert_exact(whole, image[None].flip(3) if whole[0, 0, 0, 0] > 0 else image[None])


def test_the_schedule_rises_and_falls():
    rates = [relative_lr(i / 100, 0.05) for i in range(101)]
    assert rates[0] == 0 and np.argmax(rates) == 5 and rates[5] > 0.99 and rates[-1] < 1e-9
    assert relative_lr(0, 0) == 1


# The file


def test_what_is_loaded_is_what_was_trained(trained):
    out, outcome = trained
    model = load_source(out)
    assert not model.training and model.num_classes == 3 and same(out, out)
    config = resolve_model_data_config(model)
    assert config["mean"] == MEAN and config["std"] == STD and config["input_size"] == (3, 32, 32)
    assert input_of(model)[:3] == (32, MEAN, STD) and model.pretrained_cfg["label_names"] == tuple(COLOURS)
    held_out = split(domain(), list(COLOURS), 0.1, 0)[1]
    with torch.no_grad():
        right = model(held_out.load(np.arange(6))).argmax(1).numpy() == held_out.labels
    assert right.mean() == outcome.accuracy
    plain = timm.create_model(NAME, num_classes=3)
    plain.load_state_dict(load_file(out))  # a state dict for anybody
    assert type(load_model(str(out))) is VisionTransformer


def test_files_that_are_no_source_models(trained, tmp_path):
    file = tmp_path / "a.safetensors"
    with pytest.raises(StateError, match="does not exist"):
        load_source(file)
    content = trained[0].read_bytes()
    for damaged, message in (
        (content[: len(content) // 2], "truncated"),
        (content[:-4] + b"1234", "damaged"),
        (b"hello", "truncated"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(StateError, match=message):
            load_source(file)
    statefile.write(file, {"a": torch.zeros(1)}, {"method": "dct"})
    with pytest.raises(StateError, match="no source model that acclimate trained, but a state file"):
        load_source(file)
    tensors, header = statefile.read(trained[0])
    for other in (
        {"model": "test_resnet"},
        {"model": "test_vit"},
        {"model": "gone"},
        {"input_size": [3, 64, 64]},
        {"std": 1},
    ):
        statefile.write(file, tensors, {**header, "settings": {**header["settings"], **other}})
        with pytest.raises(StateError, match="cannot be rebuilt by timm"):
            load_source(file)


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({"model": ["test_vit"]}, {}),
        ({"model": "hf-hub:somebody/something"}, {}),
        ({"model": "vit_giant_patch14_224"}, {}),  # would fill gigabytes before the weights do not fit
        ({"classes": "abc"}, {}),
        ({"classes": ["a"] * 10**5}, {}),
        ({"mean": [10**400] * 3}, {}),
        ({"crop_pct": []}, {}),
        ({}, {"head.bias": torch.full((3,), float("nan"))}),
        ({}, {"head.bias": torch.zeros(3, dtype=torch.complex64)}),
        ({}, {"head.bias": torch.zeros(4)}),
        ({}, {"more": torch.zeros(4)}),
    ],
    ids=lambda lie: str(lie)[:60],
)
def test_a_forged_source_model_is_refused(trained, tmp_path, settings, tensors):
    honest, header = statefile.read(trained[0])
    file = tmp_path / "forged.safetensors"
    statefile.write(file, {**honest, **tensors}, {**header, "settings": {**header["settings"], **settings}})
    with pytest.raises(StateError, match="forged"):
        load_source(file)
    statefile.write(file, honest, {**header, "settings": None})
    with pytest.raises(StateError, match="settings"):
        load_source(file)


@pytest.mark.parametrize(
    ("header", "tensors"),
    [
        ({"history": None}, {}),
        ({"history": [[1.0]]}, {}),
        ({"history": [["a", "b"]]}, {}),
        ({"settings": []}, {}),
        ({}, {"head.bias": torch.full((3,), float("inf"))}),
        ({}, {"head.bias": torch.zeros(4)}),
        ({}, {"momentum/head.bias": torch.full((3,), float("nan"))}),
        ({}, {"momentum/head.bias": torch.zeros(4)}),
        ({}, {"momentum/gone": torch.zeros(4)}),
    ],
    ids=lambda lie: str(lie)[:60],
)
def test_a_forged_checkpoint_is_refused(tmp_path, header, tensors):
    out, half = tmp_path / "source.safetensors", tmp_path / "source.safetensors.unfinished"
    with pytest.raises(KeyboardInterrupt):
        train(out, Interrupting(6))
    honest, honest_header = statefile.read(half)
    assert honest_header["history"] and "momentum/head.bias" in honest
    statefile.write(half, {**honest, **tensors}, {**honest_header, **header})
    with pytest.raises(StateError, match="unfinished"):
        train(out)
    assert not out.exists()


# The command


def arguments(root, out, *more):
    given = [
        "--data",
        "folder",
        "--root",
        str(root),
        "--out",
        str(out),
        "--model",
        NAME,
        "--device",
        "cpu",
        "--workers",
        "0",
    ]
    return [*given, "--no-pretrained", "--batch-size", "16", "--head-lr", "0.1", "--backbone-lr", "0.02", *more]


def run(given):
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    parsed = parser.parse_args(["train-source", *given])
    parsed.run(parsed)


def test_the_command(root, tmp_path, capsys):
    out = tmp_path / "photos.safetensors"
    run(arguments(root, out, "--epochs", "4"))
    said = capsys.readouterr().out
    assert "epoch 4/4: loss" in said and "of 6 images held out." in said and "finished before" not in said
    run(arguments(root, out, "--epochs", "4"))
    assert "--fresh trains it again" in capsys.readouterr().out
    with safe_open(out, "pt") as file:
        header = json.loads(file.metadata()["acclimate"])
    assert header["settings"]["classes"] == ["blue", "green", "red"] and header["accuracy"] > 0.8
    model = load_model(str(out))
    data = open_data("folder", root, model)  # the head fits, and so does the normalisation
    assert data.classes is None and data.domains[0].identity == header["settings"]["data"]
    assert Preprocess.for_model(model).mean == MEAN and command.MODEL == MODEL


def test_the_command_knows_its_domains(root, tmp_path):
    office = ["--data", "office-home", "--root", str(root), "--out", str(tmp_path / "a.safetensors"), "--model", NAME]
    with pytest.raises(ConfigError, match="name one with --domains"):
        run(office)
    with pytest.raises(ConfigError, match="Did you mean 'Clipart'"):
        run([*office, "--domains", "Clip art"])
    (root / "only").mkdir()
    Image.new("RGB", (40, 40)).save(root / "only" / "one.png")
    with pytest.raises(InputError, match="only has 1"):
        run(arguments(root, tmp_path / "a.safetensors"))


def test_a_terminal_shows_a_bar(tmp_path):
    shown = io.StringIO()
    train(tmp_path / "a.safetensors", recipe=Recipe(epochs=2), console=Console(file=shown, force_terminal=True, width=120))
    assert "epoch 2/2: loss" in shown.getvalue() and "held out" in shown.getvalue()
