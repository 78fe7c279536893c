"""The bundled images and model, and the command that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import acclimate
from acclimate.cli import main
from acclimate.core.registry import create_method
from acclimate.data import bundled
from acclimate.data.domains import Corrupted, Images, Subset
from acclimate.data.streams import Stream
from acclimate.errors import ConfigError, InputError

NORMALISED = {"mean": bundled.MEAN, "std": bundled.STD}


def test_the_images_are_fashion_mnists_test_part():
    images = acclimate.bundled.images()
    assert images.pixels.shape == (10_000, 28, 28, 3) and images.pixels.dtype == np.uint8
    assert np.bincount(images.labels).tolist() == [1000] * 10
    assert images.labels[:5].tolist() == [9, 2, 1, 1, 6]
    assert np.array_equal(images.pixels[..., 0], images.pixels[..., 2])


def test_the_files_are_small_and_come_with_their_licence():
    sizes = {path.name: path.stat().st_size for path in bundled.HERE.iterdir()}
    assert sum(size for name, size in sizes.items() if name.startswith("t10k")) <= 5_000_000
    assert sizes["vit.safetensors"] <= 8_000_000
    assert "Zalando" in (bundled.HERE / "LICENSE.txt").read_text()


def test_the_model_is_a_vit_that_knows_clothes():
    model, images = acclimate.bundled.model(), acclimate.bundled.images()
    assert isinstance(model, VisionTransformer) and len(model.blocks) == 12 and not model.training
    domain = Corrupted(images, **NORMALISED)
    with torch.inference_mode():
        chunks = np.array_split(np.arange(0, 10_000, 5), 4)
        right = [model(domain.load(chunk)).argmax(1).numpy() == images.labels[chunk] for chunk in chunks]
    assert np.concatenate(right).mean() >= 0.9


def test_the_model_can_be_adapted_like_any_other():
    images = Corrupted(acclimate.bundled.images(), "fog", 3, **NORMALISED).load(np.arange(16))
    model = acclimate.adapt(acclimate.bundled.model(), "dct")
    assert model(images).shape == (16, 10)
    assert model.record.used > 0 and model.record.drift > 0


def test_the_tuned_options_exist_and_were_found_with_the_same_effort():
    assert {"tent", "sar", "dct", "t3a", "eata", "cotta"} <= set(bundled.tuned_options())
    for method, options in bundled.tuned_options().items():
        create_method(method, options)
    outcome = json.loads(bundled.TUNED.read_text())
    assert {len(trials) for trials in outcome["trials"].values()} == {outcome["trials_each"]}
    for method, trials in outcome["trials"].items():
        assert max(trial["mean"] for trial in trials) == outcome["chosen_mean"][method]
        assert str(outcome["images"][method]) in outcome["source"], "what it was compared with"
        assert {name.split("/")[0] for trial in trials for name in trial["accuracy"]} == set(bundled_extra())


def bundled_extra() -> tuple[str, ...]:
    from acclimate.data.corruptions import EXTRA

    return EXTRA


def test_the_statistics_are_of_this_model():
    statistics = bundled.statistics()
    assert statistics.about["samples"] == 2000
    assert statistics.of("features")["class_counts"].sum() == 2000
    acclimate.adapt(bundled.model(), "eata", source_statistics=statistics)


def test_the_logits_are_those_of_images_that_no_stream_shows():
    images = Corrupted(bundled.images(), **NORMALISED)
    unseen = Subset.sample(images, bundled.FOR_TUNING, skip=len(images.labels) - bundled.FOR_TUNING)
    logits = bundled.logits().of("logits")["logits"]
    assert logits.shape == (bundled.FOR_TUNING, 10)
    with torch.no_grad():
        assert torch.allclose(bundled.model()(unseen.load(np.arange(40))), logits[:40], atol=1e-4)
    acclimate.adapt(bundled.model(), "poem", source_statistics=bundled.logits())


def test_a_sample_is_drawn_once_for_all():
    images = Corrupted(bundled.images(), **NORMALISED)
    few = Subset.sample(images, 50)
    assert len(few.labels) == 50 == len(np.unique(few.chosen))
    assert np.array_equal(few.chosen, Subset.sample(images, 50).chosen)
    assert torch.equal(few.load(np.arange(50)), images.load(few.chosen))
    most = len(images.labels) - bundled.FOR_TUNING
    shown, tuned_on = Subset.sample(images, most), Subset.sample(images, bundled.FOR_TUNING, skip=most)
    assert not set(shown.chosen) & set(tuned_on.chosen)
    with pytest.raises(InputError, match="10000"):
        Subset.sample(images, 10_001)
    with pytest.raises(ConfigError, match="images=0"):
        Subset.sample(images, 0)


def first(count):
    return Images(*(array[:count] for array in bundled.images()))


def test_corrupted_images_do_not_depend_on_who_asks():
    images = first(20)
    noisy = Corrupted(images, "gaussian_noise", 3, **NORMALISED)
    some = noisy.load(np.array([7, 3]))
    assert torch.equal(some, Corrupted(images, "gaussian_noise", 3, **NORMALISED).load(np.arange(20))[[7, 3]])
    assert noisy.corruption.constants == "cifar-10-c"
    assert torch.equal(some[0], Corrupted(first(40), "gaussian_noise", 3, **NORMALISED).load(np.array([7]))[0])
    stream = Stream(noisy, batch_size=6)
    with_workers = Stream(noisy, batch_size=6, workers=2)
    assert all(torch.equal(a.images, b.images) for a, b in zip(stream, with_workers))
    clean = Corrupted(images, **NORMALISED).load(np.array([7]))
    assert torch.allclose(clean[0, 0], torch.from_numpy(images.pixels[7, ..., 0]) / 127.5 - 1)


def test_a_domain_that_cannot_be_is_refused():
    images = first(4)
    with pytest.raises(InputError, match="4 images have 3 labels"):
        Corrupted(images._replace(labels=images.labels[:3]), **NORMALISED)
    with pytest.raises(InputError, match="severity=None"):
        Corrupted(images, "fog", **NORMALISED)
    with pytest.raises(ConfigError, match="severity=6"):
        Corrupted(images, "fog", 6, **NORMALISED)
    with pytest.raises(ConfigError, match="seed=-1"):
        Corrupted(images, "fog", 5, **NORMALISED, seed=-1)
    for mean, std in (((0.5,), (0.5,) * 3), ((0.5,) * 3, (0.5, 0, 0.5))):
        with pytest.raises(ConfigError, match="std="):
            Corrupted(images, mean=mean, std=std)
    with pytest.raises(ConfigError, match="'fog'"):
        Corrupted(images, "frog", 5, **NORMALISED)


QUICK = ["bench", "--images", "64", "--corruptions", "fog,contrast", "--methods", "source,tent"]


def test_bench_prints_a_table_and_keeps_the_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    for word in ("source", "tent", "fog", "contrast", "mean", "second half"):
        assert word in first
    results = list(tmp_path.glob("*/result.json"))
    assert len(results) == 4
    assert json.loads(results[0].read_text())["spec"]["preprocessing"][0]["corruption constants"] == "cifar-10-c"
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    second = capsys.readouterr().out
    assert "4 of 4 were found" in " ".join(second.split())
    assert [line for line in second.splitlines() if "tent" in line] == [
        line for line in first.splitlines() if "tent" in line
    ]


@pytest.mark.parametrize("setting", ["bs1", "label-shift", "mixed", "continual+label-shift", "gradual"])
def test_bench_knows_every_setting(setting, tmp_path, capsys):
    arguments = ["bench", "--images", "12", "--corruptions", "fog,contrast", "--methods", "source", "--setting", setting]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert setting in capsys.readouterr().out
    (path, *others) = tmp_path.glob("*/result.json")
    kept = json.loads(path.read_text())
    assert kept["spec"]["setting"] == setting
    assert kept["spec"]["batch_size"] == (1 if "bs1" in setting else 64)
    assert len(others) == (1 if setting in ("bs1", "label-shift") else 0)
    samples = {"bs1": 12, "label-shift": 24, "mixed": 24, "continual+label-shift": 48, "gradual": 2 * 9 * 12}
    assert kept["result"]["samples"] == pytest.approx(samples[setting], abs=10 if "label" in setting else 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--severity", "6"], "from 1 to 5"),
        (["--severity", "0"], "from 1 to 5"),
        (["--constants", "imagenet"], "Did you mean 'imagenet-c'"),
        (["--methods", ""], "--methods"),
        (["--seeds", "1,1"], "--seeds"),
        (["--corruptions", ","], "--corruptions"),
        (["--full", "--corruptions", "fog"], "--full"),
        (["--images", "8001"], "at most 8000"),
        (["--corruptions", "frog"], "Did you mean 'fog'"),
        (["--methods", "source,tend"], "Did you mean 'tent'"),
        (["--setting", "norml"], "Unknown setting"),
        (["--seeds", "a"], "--seeds: 'a'"),
        (["--images", "0"], "--images"),
        (["--setting", "gradual", "--severity", "3"], "gradual"),
        (["--batch-size", "0"], "--batch-size"),
    ],
)
def test_bench_refuses_what_makes_no_sense(arguments, message, tmp_path, capsys):
    assert main(["bench", *arguments, "--out", str(tmp_path / "runs")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_interrupted_bench_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("acclimate.evaluation.jobs.run", interrupted)
    assert main([*QUICK, "--out", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not list(Path(tmp_path).glob("*/result.json"))


def test_the_prompts_are_of_this_model():
    prompts = bundled.prompts()
    assert prompts.about["samples"] + prompts.about["held_out"] == 6000 and bundled.PROMPTS.stat().st_size < 1.5e6
    model = acclimate.adapt(bundled.model(), "dept-g", source_statistics=prompts)
    assert model.method.learned.sizes.prompts == 8
    assert [s.kinds for s in bundled.source_statistics(["prompts"])] == [["prompts"]] and bundled.source_statistics([]) == []
    assert [s.kinds for s in bundled.source_statistics(["prompts", "fisher"])] == [
        ["class_tokens", "features", "fisher"],
        ["prompts"],
    ]
