"""A testbed: the same way from a model and data to every experiment."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import acclimate
from acclimate import cli
from acclimate.data.catalog import SHOWN, Selection, open_data
from acclimate.data.domains import CLEAN, DomainKey, Subset
from acclimate.errors import ConfigError
from acclimate.evaluation.testbed import open_testbed
from acclimate.models.normalisation import processor_normalisation
from acclimate.testing.check import SIZES, tiny_model

MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
QUIET = dict(methods=["source"], images=10, out=None)


@pytest.fixture
def photos(tmp_path):
    """A folder for each class of the tiny model, with two images each."""
    rng = np.random.default_rng(0)
    for label in range(SIZES.classes):
        (tmp_path / "photos" / str(label)).mkdir(parents=True)
        for i in range(2):
            pixels = rng.integers(0, 256, (40, 48, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / str(label) / f"{i}.png")
    return tmp_path / "photos"


def preprocessing(results):
    (how,) = results[0].spec.preprocessing
    return how


# Models that do not say how their images are normalised


@pytest.mark.parametrize("family", ["hf", "torchvision"])
def test_a_model_that_does_not_say_its_normalisation_needs_it_and_takes_it(family, photos):
    with pytest.raises(ConfigError, match="give mean= and std="):
        acclimate.bench(tiny_model(family), "folder", photos, **QUIET)
    results = acclimate.bench(tiny_model(family), "folder", photos, mean=MEAN, std=STD, **QUIET)
    assert preprocessing(results)["mean"] == MEAN and preprocessing(results)["std"] == STD


def test_a_processor_says_how_images_are_normalised(photos):
    processor = SimpleNamespace(image_mean=MEAN, image_std=STD)
    results = acclimate.bench(tiny_model("hf"), "folder", photos, processor=processor, **QUIET)
    assert preprocessing(results)["mean"] == MEAN
    with pytest.raises(ConfigError, match="leave out mean="):
        open_testbed(tiny_model("hf"), "folder", photos, processor=processor, mean=MEAN, std=STD)


def test_processors_of_the_libraries_are_understood():
    from torchvision.models import ViT_B_16_Weights
    from transformers import ViTImageProcessor

    assert processor_normalisation(ViTImageProcessor(image_mean=MEAN, image_std=STD)) == (MEAN, STD)
    weights = ViT_B_16_Weights.IMAGENET1K_V1
    expected = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert processor_normalisation(weights) == processor_normalisation(weights.transforms()) == expected
    with pytest.raises(ConfigError, match="a dict has no image_mean"):
        processor_normalisation({"mean": MEAN})


def test_the_command_line_takes_mean_and_std(photos, tmp_path, capsys, monkeypatch):
    opened = {}
    monkeypatch.setattr("acclimate.evaluation.bench.bench", lambda *given, **options: opened.update(options) or [])
    monkeypatch.setattr("acclimate.report.terminal.show", lambda *given, **options: None)
    assert cli.main(["bench", "--mean", "0.1,0.2,0.3", "--std", "0.5,0.5,0.5", "--out", str(tmp_path)]) == 0
    assert opened["mean"] == MEAN and opened["std"] == [0.5, 0.5, 0.5]
    assert cli.main(["bench", "--mean", "grey", "--std", "0.5"]) == 2
    assert "--mean: 'grey' is not a number" in capsys.readouterr().err


# Data


def test_clean_is_a_corruption_of_every_data_set_with_clean_images(photos):
    how = dict(model_name="tiny", mean=MEAN, std=STD)
    chosen = Selection(corruptions=[CLEAN, "fog"], severities=[1, 3])
    testbed = open_testbed(tiny_model("hf"), "folder", photos, chosen, **how)
    assert [domain.key for domain in testbed.data.domains] == [
        DomainKey(CLEAN),
        DomainKey("fog", 1),
        DomainKey("fog", 3),
    ]
    plain = open_data("folder", photos, tiny_model("hf"), mean=MEAN, std=STD).domains[0]
    assert torch.equal(testbed.data.domains[0].load(np.arange(20)), plain.load(np.arange(20)))
    results = acclimate.bench(tiny_model("hf"), "folder", photos, corruptions=[CLEAN], mean=MEAN, std=STD, **QUIET)
    assert results[0].spec.domains == [DomainKey(CLEAN)]


def test_data_opens_other_domains_of_the_same_images(photos):
    data = open_data("folder", photos, tiny_model("hf"), Selection(images=6), mean=MEAN, std=STD)
    fog, clean = data.domain("fog", 2), data.domain()
    assert fog.key == DomainKey("fog", 2) and clean.key == DomainKey(CLEAN)
    assert isinstance(fog, Subset) and np.array_equal(fog.chosen, data.domains[0].chosen)
    bundled = open_testbed(selection=Selection(corruptions=["fog"], images=8)).data
    assert bundled.domain("fog") is bundled.domains[0] and bundled.domain("snow", 4).key == DomainKey("snow", 4)


def test_the_bundled_images_are_an_entry_of_the_catalogue():
    data = open_data("bundled", None, acclimate.bundled.model(), Selection(images=4))
    assert data.name == "bundled" and data.num_classes == 10
    assert [domain.key.name for domain in data.domains] == list(SHOWN)
    with pytest.raises(ConfigError, match="leave out root="):
        open_data("bundled", "somewhere", acclimate.bundled.model())
    with pytest.raises(ConfigError, match="28 x 28 pixels and 10 classes; this model takes 32 x 32"):
        open_data("bundled", None, tiny_model("hf"), mean=MEAN, std=STD)


def test_given_domains_are_taken_as_they_are(photos):
    domains = open_data("folder", photos, tiny_model("hf"), mean=MEAN, std=STD).domains
    testbed = open_testbed(tiny_model("hf"), domains, selection=Selection(images=3))
    assert [len(domain.labels) for domain in testbed.data.domains] == [3]
    with pytest.raises(ConfigError, match="only images="):
        open_testbed(tiny_model("hf"), domains, selection=Selection(corruptions=["fog"]))


# What belongs to a model


def test_the_bundled_model_brings_options_and_statistics():
    testbed = open_testbed(selection=Selection(images=4))
    assert testbed.options("tent") == acclimate.bundled.tuned_options()["tent"]
    assert testbed.statistics_for("eata", {}).kinds == acclimate.bundled.statistics().kinds
    assert testbed.statistics_for("poem", {}).kinds == ["logits"] and testbed.statistics_for("tent", {}) is None
    plain = open_testbed(selection=Selection(images=4), tuned=False, needed=())
    assert plain.options("tent") == {} and plain.options("dda") == acclimate.bundled.ASSETS["dda"] and not plain.statistics
    adapter = testbed.adapted("eata", seed=3)
    assert adapter.model is not testbed.model and adapter.method.config["lr"] == testbed.options("eata")["lr"]


def test_the_signature_of_bench_is_that_of_a_function():
    import inspect

    parameters = inspect.signature(acclimate.bench).parameters
    assert {"methods", "settings", "protocol", "execution", "out", "fresh"} <= parameters.keys()
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())
    assert inspect.isfunction(acclimate.bench) and acclimate.bench.__doc__.startswith("Run methods")
