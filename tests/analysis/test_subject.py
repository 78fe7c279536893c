"""Subjects: the images of every domain are the same, of any data, and clean ones can be elsewhere."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from subjects import HALF, tiny_subject

from acclimate.analysis.subject import Subject, predicted, with_folder, worded
from acclimate.data.catalog import Data, Selection
from acclimate.data.disk import Files
from acclimate.data.preprocess import Preprocess
from acclimate.errors import ConfigError, InputError
from acclimate.evaluation.testbed import Testbed, open_testbed
from acclimate.testing.check import SIZES, tiny_model

STORED = Preprocess(None, None, HALF, HALF)


def write_images(folder, names, side=SIZES.image, seed=0):
    rng = np.random.default_rng(seed)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(folder / name)


def test_a_subject_starts_as_a_bench_does():
    subject = Subject(open_testbed(), images=20)
    assert subject.count == 20 and subject.batch("fog", 3).shape == (20, 3, 28, 28)
    assert subject.labelled and subject.severity(None) == 5 and subject.severity(4) == 4
    assert subject.origin["model"] == subject.origin["data"] == "bundled" and len(subject.origin["weights"]) == 16
    assert (subject.domain().labels == subject.domain("snow", 1).labels).all()
    with pytest.raises(ConfigError, match="severity=6"):
        subject.severity(6)


def test_an_adapted_copy_leaves_the_source_as_it_is():
    subject = tiny_subject(70)
    before = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    adapter = subject.adapted("tent", [subject.domain("contrast")], seed=1)
    assert int(adapter.steps) == 2 and adapter.record.drift > 0
    assert int(subject.adapted("tent", [subject.domain("contrast"), subject.domain("fog")]).steps) == 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in subject.model.state_dict().items())
    assert worded(adapter) == "tent, as by default"


def test_agreement_counts_predictions_that_survive():
    subject = tiny_subject()
    adapter = subject.adapted("source", [subject.domain("contrast")])
    clean, corrupted = subject.batch(), subject.batch("contrast")
    kept = 100 * float((predicted(subject.model, clean) == predicted(subject.model, corrupted)).float().mean())
    assert f"for {kept:.1f} % of the images before, {kept:.1f} % after" in subject.agreement(adapter, clean, corrupted)
    assert "100.0 % of the images before, 100.0 % after" in subject.agreement(adapter, clean, clean)


def test_pixels_are_as_the_images_look():
    subject = tiny_subject()
    assert np.array_equal(subject.pixels(subject.batch()), subject.domain()._images.pixels)


def test_a_folder_needs_no_classes(tmp_path):
    write_images(tmp_path / "flat", ["b.png", "a.png", "c.jpg"], side=40)
    empty = open_testbed(data=Data("folder", [], ()))
    flat = Subject(with_folder(empty, tmp_path / "flat", Selection(["fog"], [3])))
    assert flat.count == 3 and not flat.labelled and flat.severity(None) == 5
    assert flat.batch().shape == flat.batch("fog", 1).shape == (3, 3, 28, 28)
    assert not torch.equal(flat.batch(), flat.batch("fog", 1))
    write_images(tmp_path / "sorted", ["bag/1.png", "coat/1.png", "coat/old/2.png"], side=40)
    named = Subject(with_folder(empty, tmp_path / "sorted", Selection(["fog"], images=2)))
    assert named.labelled and list(named.data.class_names) == ["bag", "coat"] and named.count == 2
    assert empty.tuned(64) == named.testbed.tuned(64)
    with pytest.raises(InputError, match="images=9"):
        with_folder(empty, tmp_path / "flat", Selection(["fog"], images=9))


@pytest.fixture
def stored(tmp_path):
    """Corrupted images on disk, as in ImageNet-C, with clean ones elsewhere."""
    files = [f"n0{i % 2}/{i}.png" for i in range(6)]
    for severity in (1, 5):
        write_images(tmp_path / f"fog/{severity}", files, seed=severity)
    write_images(tmp_path / "clean", [*files, "n01/other.png"], side=40)
    files = sorted(files)

    def opened(key):
        return Files(tmp_path / f"fog/{key.severity}", files, [0] * 6, STORED, name=key.name, severity=key.severity)

    model = tiny_model()
    model.pretrained_cfg = {"mean": HALF, "std": HALF, "crop_pct": 0.875}
    from acclimate.data.domains import DomainKey

    return Subject(Testbed(model, "tiny", Data("imagenet-c", [opened(DomainKey("fog", 5))], ("n00", "n01"), opener=opened)))


def test_clean_images_of_stored_corruptions_are_matched_by_name(stored, tmp_path):
    clean = replace(stored, clean=tmp_path / "clean", images=4)
    shown, first = clean.domain(), clean.domain("fog", 1)
    files = first.domain
    for i in range(4):
        expected = files.path(first.chosen[i]).replace(str(tmp_path / "fog/1"), str(tmp_path / "clean"))
        assert shown.path(i) == expected
    assert clean.batch().shape == clean.batch("fog", 1).shape == (4, 3, SIZES.image, SIZES.image)
    assert (shown.labels == first.labels).all()


def test_missing_clean_images_are_an_error_that_says_what_to_give(stored, tmp_path):
    with pytest.raises(ConfigError, match=r"imagenet-c has no clean images.*<wnid>/\*.JPEG, with --clean DIR"):
        stored.domain()
    shutil.rmtree(tmp_path / "clean" / "n00")
    with pytest.raises(InputError, match="lacks 3 of 6 clean images"):
        replace(stored, clean=tmp_path / "clean").domain()


def test_domains_with_other_images_are_not_compared(stored, tmp_path):
    first = stored.data.domain("fog", 5)
    other = Files(tmp_path / "fog/1", ["n00/0.png"] * 6, [0] * 6, STORED, name="fog", severity=1)
    data = replace(stored.data, domains=[first, other])
    with pytest.raises(InputError, match="fog/1 and fog/5 do not have the same images"):
        replace(stored, testbed=replace(stored.testbed, data=data)).domain("fog", 1)
