"""The figure of attention rollout: its numbers, its words, and that it can be drawn of any model."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from subjects import tiny_subject

from acclimate.analysis import rollout
from acclimate.analysis.intervals import Adaptation
from acclimate.analysis.rollout import CASES
from acclimate.errors import ConfigError
from support import assert_exact

MANY = Adaptation(8, 0.01)
COUNT = 12


@pytest.mark.numerics
def test_rollout_of_every_image_sums_to_one(family, monkeypatch):
    subject = tiny_subject(family=family)
    model, images = subject.model.double(), subject.batch().double()
    maps = rollout.rolled_out(model, images)
    assert maps.shape == (6, 4, 4) and maps.dtype is torch.float64
    assert_exact(maps.sum((1, 2)), [1.0] * 6)
    monkeypatch.setattr(rollout, "in_parts", lambda model, images: images.split(4))
    assert_exact(rollout.rolled_out(model, images), maps)


def test_correlation():
    a = torch.rand(3, 4, 4, dtype=torch.float64)
    assert_exact(rollout.correlation(a, 2 * a + 1), [1.0] * 3)
    assert_exact(rollout.correlation(a, -a), [-1.0] * 3)
    assert_exact(rollout.correlation(a, torch.ones_like(a)), [0.0] * 3)
    expected = [np.corrcoef(x.flatten(), y.flatten())[0, 1] for x, y in zip(a, a.flip(0))]
    assert_exact(rollout.correlation(a, a.flip(0)), expected)


def maps_and_pixels(black):
    """Return images whose left half is the object; the adapted model looks there alone, the source model everywhere."""
    pixels = np.full((COUNT, 8, 8, 3), 200, dtype=np.uint8)
    if black:
        pixels[:, :, 4:] = 0
    even = torch.full((COUNT, 2, 2), 0.25, dtype=torch.float64)
    left = torch.tensor([[0.5, 0.0], [0.5, 0.0]], dtype=torch.float64).expand(COUNT, 2, 2)
    return dict(zip(CASES, (left, even, left, left))), pixels


def test_share_of_the_object():
    maps, pixels = maps_and_pixels(black=True)
    measured = rollout.measure(maps, pixels)
    assert measured["object: share of the image"].tolist() == [0.5] * COUNT
    shares = [measured[f"object: share of the rollout, {case}"].tolist() for case in CASES[:3]]
    assert shares == [[1] * COUNT, [0.5] * COUNT, [1] * COUNT]
    first, second, third = rollout.findings(measured, "fog", "dct", 2, MANY, "8 steps")
    assert "by 0.000 in the source model, and by 1.000 after dct: +1.000 (95 % interval +1.000 to +1.000)" in first
    assert "+100.0 % of what corruption took (8 steps)" in first
    assert "two different clean images correlate by 1.000" in second
    assert "is 50.0 % of the image" in third and "holds here" in third
    assert "+50.00 points (95 % interval +50.00 to +50.00), 100.0 % of what corruption took" in third


def test_without_a_black_background_there_is_no_object():
    measured = rollout.measure(*maps_and_pixels(black=False))
    assert not any(name.startswith("object") for name in measured)
    assert len(rollout.findings(measured, "fog", "dct", 2, MANY, "8 steps")) == 2


def test_no_gain_is_called_none():
    maps, pixels = maps_and_pixels(black=True)
    maps[CASES[2]] = maps[CASES[1]]
    first, *_, last = rollout.findings(rollout.measure(maps, pixels), "fog", "dct", 2, MANY, "8 steps")
    assert "a difference is not seen" in first and "is not seen here" in last


def test_overlay_is_smooth_and_where_it_belongs():
    level = torch.zeros(7, 7)
    level[0, 6] = 1
    drawn = rollout.overlay(np.zeros((28, 28, 3), dtype=np.uint8), level)
    assert drawn.shape == (224, 224, 3)
    top = np.unravel_index(drawn.sum(-1).argmax(), drawn.shape[:2])
    assert top[0] < 32 and top[1] >= 192
    assert abs(np.diff(drawn, axis=1)).max() < 0.1  # no edges of patches
    assert rollout.overlay(np.zeros((300, 250, 3), dtype=np.uint8), level).shape == (300, 250, 3)


def test_one_step_is_no_verdict():
    said = rollout.findings(rollout.measure(*maps_and_pixels(black=True)), "fog", "dct", 2, Adaptation(1, 0.01), "1 step")
    assert "too few images or steps to say whether it is more than chance" in said[0]
    assert "cannot be judged here: too few images or steps to say" in said[2] and "holds" not in said[2]


def test_a_gain_that_is_certain_and_small_is_called_so():
    maps, pixels = maps_and_pixels(black=True)
    maps[CASES[2]] = 0.98 * maps[CASES[1]] + 0.02 * maps[CASES[0]]
    *_, last = rollout.findings(rollout.measure(maps, pixels), "fog", "dct", 2, MANY, "8 steps")
    assert "2.0 % of what corruption took" in last and "is hardly seen here" in last


def test_figure(tmp_path):
    subject = tiny_subject(3)
    (figure,) = rollout.draw(subject, corruption="contrast", rows=99, severity=3)
    files = figure.save(tmp_path)
    rows = list(csv.DictReader(files[2].open()))
    assert [row["image"] for row in rows] == list("012")
    assert figure.protocol["corruption"] == "contrast, severity 3" and figure.origin == subject.origin
    assert "The first 3 of 3 images" in figure.caption
    with pytest.raises(ConfigError, match="rows=0"):
        rollout.draw(subject, corruption="contrast", rows=0)
