"""The figure of attention rollout: its numbers, its words, and that it can be drawn of any model."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from test_distance import tiny_scene

from acclimate.analysis import rollout
from acclimate.analysis.rollout import CASES
from acclimate.errors import ConfigError


def test_rollout_of_every_picture_sums_to_one(family, monkeypatch):
    scene = tiny_scene(family)
    maps = rollout.rolled_out(scene.source, scene.batch(), "", None)
    assert maps.shape == (6, 4, 4) and maps.dtype is torch.float64
    torch.testing.assert_close(maps.sum((1, 2)), torch.ones(6, dtype=torch.float64))
    monkeypatch.setattr(rollout, "in_parts", lambda model, images: images.split(4))
    torch.testing.assert_close(rollout.rolled_out(scene.source, scene.batch(), "", None), maps)


def test_correlation():
    a = torch.rand(3, 4, 4, dtype=torch.float64)
    close = torch.testing.assert_close
    close(rollout.correlation(a, 2 * a + 1), torch.ones(3, dtype=torch.float64))
    close(rollout.correlation(a, -a), -torch.ones(3, dtype=torch.float64))
    assert rollout.correlation(a, torch.ones_like(a)).abs().max() < 1e-6
    expected = [np.corrcoef(x.flatten(), y.flatten())[0, 1] for x, y in zip(a, a.flip(0))]
    close(rollout.correlation(a, a.flip(0)), torch.tensor(expected))


def maps_and_pixels(black):
    """Two pictures whose left half is the object; the adapted model looks there alone, the source model everywhere."""
    pixels = np.full((2, 8, 8, 3), 200, dtype=np.uint8)
    if black:
        pixels[:, :, 4:] = 0
    even = torch.full((2, 2, 2), 0.25, dtype=torch.float64)
    left = torch.tensor([[0.5, 0.0], [0.5, 0.0]], dtype=torch.float64).expand(2, 2, 2)
    return dict(zip(CASES, (left, even, left, left))), pixels


def test_share_of_the_object():
    maps, pixels = maps_and_pixels(black=True)
    measured = rollout.measure(maps, pixels)
    assert measured["object: share of the picture"].tolist() == [0.5, 0.5]
    shares = [measured[f"object: share of the rollout, {case}"].tolist() for case in CASES[:3]]
    assert shares == [[1, 1], [0.5, 0.5], [1, 1]]
    first, second, third = rollout.findings(measured, "fog", "dct", 2, "8 steps")
    assert "by 0.000 in the source model, and by 1.000 after dct: +1.000 ± 0.000" in first
    assert "+100.0 % of what corruption took (8 steps)" in first
    assert "two different clean pictures correlate by 1.000" in second
    assert "is 50.0 % of the picture" in third and "+50.00 ± 0.00 points" in third and "holds here" in third


def test_without_a_black_background_there_is_no_object():
    measured = rollout.measure(*maps_and_pixels(black=False))
    assert not any(name.startswith("object") for name in measured)
    assert len(rollout.findings(measured, "fog", "dct", 2, "8 steps")) == 2


def test_no_gain_is_called_none():
    maps, pixels = maps_and_pixels(black=True)
    maps[CASES[2]] = maps[CASES[1]]
    first, *_, last = rollout.findings(rollout.measure(maps, pixels), "fog", "dct", 2, "8 steps")
    assert "no difference to speak of" in first and "is not seen here" in last


def test_overlay_is_smooth_and_where_it_belongs():
    level = torch.zeros(7, 7)
    level[0, 6] = 1
    drawn = rollout.overlay(np.zeros((28, 28, 3), dtype=np.uint8), level)
    assert drawn.shape == (224, 224, 3)
    top = np.unravel_index(drawn.sum(-1).argmax(), drawn.shape[:2])
    assert top[0] < 32 and top[1] >= 192
    assert abs(np.diff(drawn, axis=1)).max() < 0.1  # no edges of patches
    assert rollout.overlay(np.zeros((300, 250, 3), dtype=np.uint8), level).shape == (300, 250, 3)


def test_pictures_are_shown_as_they_are():
    scene = tiny_scene()
    assert np.array_equal(rollout._pixels(scene, scene.batch()), scene.images.pixels)


def test_figure(tmp_path):
    scene = tiny_scene(count=3)
    figure = rollout.draw(scene, "contrast", "dct", rows=99, severity=3, seed=0, console=None)
    files = figure.save(tmp_path)
    rows = list(csv.DictReader(files[2].open()))
    assert [row["picture"] for row in rows] == list("012")
    assert figure.protocol["corruption"] == "contrast, severity 3"
    assert "The first 3 of 3 pictures" in figure.caption
    with pytest.raises(ConfigError, match="rows=0"):
        rollout.draw(scene, "contrast", "dct", rows=0, severity=3, seed=0, console=None)
