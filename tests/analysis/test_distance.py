"""The figure of attention distances: its numbers, its words, and that it can be drawn of any model."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
import torch

from acclimate.analysis import distance
from acclimate.analysis.attention import Reach
from acclimate.analysis.scene import Scene, predicted
from acclimate.data.domains import Images
from acclimate.errors import AcclimateError, ConfigError
from acclimate.testing.check import SIZES, tiny_vit

HALF = (0.5, 0.5, 0.5)


def tiny_scene(family="timm", count=6):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    images = Images(pixels, np.zeros(count, dtype=np.int64), np.arange(count))
    return Scene(tiny_vit(family), images, False, "tiny", HALF, HALF, 2)


def made(raw, renormalised=None, added=0.0):
    """Profiles of 4 pictures, 3 blocks and 2 heads, flat but for a difference between pictures."""
    spread = torch.linspace(-0.1, 0.1, 4, dtype=torch.float64)[:, None, None].expand(4, 3, 2)
    first = raw + spread
    second = (raw if renormalised is None else renormalised) + spread
    return Reach(first, second, 9 * first, torch.ones_like(first), torch.full_like(first, added))


def said(clean, severities, adapted, before=None):
    profiles = {"clean": clean, **{f"severity {s}": p for s, p in enumerate(severities, 1)}, "dct, severity 2": adapted}
    if before is not None:
        profiles["dct before its first step"] = before
    return distance.findings(profiles, "fog", "dct", 2, "8 steps")


def test_profile_does_not_depend_on_the_parts(family, monkeypatch):
    scene = tiny_scene(family)
    whole = distance.profile(scene.source, scene.batch())
    assert whole.distance.shape == (6, SIZES.depth, SIZES.heads) and whole.distance.dtype is torch.float64
    monkeypatch.setattr(distance, "in_parts", lambda model, images: images.split(4))
    for a, b in zip(whole, distance.profile(scene.source, scene.batch())):
        torch.testing.assert_close(a, b)


def test_findings_of_a_recovery_that_is_real():
    *_, mechanical, verdict = said(made(10), [made(10.5), made(11), made(11.5), made(12), made(13)], made(10.2, 10.2))
    assert "changes the mean distance by -0.80 px, and renormalised by -0.80 px" in mechanical
    assert "it adds no keys" in mechanical
    assert "first half holds here. The second holds: renormalised, dct closes 80.0 % of the gap" in verdict
    assert verdict.endswith("(8 steps).")


def test_findings_of_a_recovery_that_is_only_the_added_key():
    severities = [made(10.5), made(11), made(11.5), made(12), made(13)]
    first, second, mechanical, verdict = said(made(10), severities, made(10, 11, added=0.1), made(10.1, 11, added=0.09))
    assert "10.00 px far on clean pictures, and 10.50, 11.00, 11.50, 12.00, 13.00 px under fog" in first
    assert "+3.00 ± 0.00 px" in first
    assert "1.00 px from the clean one in a mean block, that of dct 0.00 px;" in second and "1.00 and 1.00 px" in second
    assert "its added keys take 10.0 % of the attention. So 0.0 % of the change is in how" in mechanical
    assert mechanical.endswith("Before it learned anything, the change was -0.90 px.")
    assert "The second is not seen: renormalised, dct closes 0.0 % of the gap" in verdict


def test_findings_of_a_corruption_that_shortens_the_distance():
    *_, verdict = said(made(10), [made(9.5), made(9), made(8.5), made(8), made(7)], made(9.3))
    assert "first half is not seen here. The second holds in part" in verdict


def test_figure(tmp_path):
    scene = tiny_scene()
    weights = {name: t.clone() for name, t in scene.source.state_dict().items()}
    figure = distance.draw(scene, "contrast", "dct", seed=0, console=None)
    files = figure.save(tmp_path)
    assert [file.name for file in files] == [f"attention-distance.{kind}" for kind in ("png", "svg", "csv", "json")]
    rows = list(csv.DictReader(io.StringIO(files[2].read_text())))
    assert len(rows) == 8 * SIZES.depth * SIZES.heads and len({row["case"] for row in rows}) == 8
    first = rows[0]
    assert first["case"] == "clean" and (first["block"], first["head"]) == ("1", "1")
    assert float(first["total"]) == pytest.approx(16 * float(first["distance"]), rel=1e-4)
    added = {row["case"] for row in rows if float(row["on_added"]) > 0}
    assert added == {"dct, severity 2", "dct before its first step"}
    words = json.loads(files[3].read_text())
    assert "Dashed" in words["caption"] and words["protocol"]["corruption"] == "contrast, severity 2"
    assert "(1 steps moved" in words["findings"][-1]
    assert all(torch.equal(t, weights[name]) for name, t in scene.source.state_dict().items())


def test_a_method_without_added_keys_needs_no_control():
    figure = distance.draw(tiny_scene(), "contrast", "tent", seed=0, console=None)
    assert len({row["case"] for row in figure.rows}) == 7 and not any(row["on_added"] for row in figure.rows)
    assert "Dashed" not in figure.caption


def test_outcome_counts_predictions_that_survive():
    scene = tiny_scene()
    adapter = scene.adapted("source", "contrast")
    clean, corrupted = scene.batch(), scene.batch("contrast")
    kept = 100 * float((predicted(scene.source, clean) == predicted(scene.source, corrupted)).float().mean())
    assert f"for {kept:.1f} % of the pictures before, {kept:.1f} % after" in scene.outcome(adapter, clean, corrupted)
    assert "100.0 % of the pictures before, 100.0 % after" in scene.outcome(adapter, clean, clean)


def test_unknown_names_are_errors():
    with pytest.raises(AcclimateError, match="fogg"):
        distance.draw(tiny_scene(), "fogg", "dct", seed=0, console=None)
    with pytest.raises(ConfigError, match="Unknown method 'dtc'"):
        distance.draw(tiny_scene(), "fog", "dtc", seed=0, console=None)
