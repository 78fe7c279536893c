"""The figure of attention distances: its numbers, its words, and that it can be drawn of any model."""

from __future__ import annotations

import csv
import io
import json

import pytest
import torch
from subjects import tiny_subject

from acclimate.analysis import attention_distance
from acclimate.analysis.attention import Reach
from acclimate.analysis.intervals import Adaptation
from acclimate.analysis.subject import Subject
from acclimate.errors import AcclimateError, ConfigError
from acclimate.testing.check import SIZES

pytestmark = pytest.mark.numerics


def made(raw, renormalised=None, added=0.0, images=12):
    """Return profiles of 3 blocks and 2 heads, flat but for a difference between images."""
    spread = torch.linspace(-0.1, 0.1, images, dtype=torch.float64)[:, None, None].expand(images, 3, 2)
    first = raw + spread
    second = (raw if renormalised is None else renormalised) + spread
    return Reach(first, second, 9 * first, torch.ones_like(first), torch.full_like(first, added))


MANY = Adaptation(8, 0.01)


def said(clean, severities, adapted, before=None, adaptation=MANY):
    profiles = {"clean": clean, **{f"severity {s}": p for s, p in enumerate(severities, 1)}, "dct, severity 2": adapted}
    if before is not None:
        profiles["dct before its first step"] = before
    return attention_distance.findings(profiles, "fog", "dct", 2, adaptation, "8 steps")


def test_profile_does_not_depend_on_the_parts(family, monkeypatch):
    subject = tiny_subject(family=family)
    whole = attention_distance.profile(subject.model, subject.batch())
    assert whole.distance.shape == (6, SIZES.depth, SIZES.heads) and whole.distance.dtype is torch.float64
    monkeypatch.setattr(attention_distance, "in_parts", lambda model, images: images.split(4))
    for a, b in zip(whole, attention_distance.profile(subject.model, subject.batch())):
        torch.testing.assert_close(a, b)


SEVERITIES = [made(10.5), made(11), made(11.5), made(12), made(13)]


def test_findings_of_a_recovery_that_is_real():
    *_, mechanical, verdict = said(made(10), SEVERITIES, made(10.2, 10.2))
    assert "changes the mean distance by -0.80 px (95 % interval -0.80 to -0.80), and renormalised by -0.80 px" in mechanical
    assert "it adds no keys" in mechanical
    assert "That corruption lengthens the distance, as in the paper, holds here." in verdict
    assert (
        "largely restores it holds here: renormalised, dct closes 80.0 % of the gap to the clean profile, +0.80 px"
        in verdict
    )
    assert verdict.endswith("(8 steps).")


def test_findings_of_a_recovery_that_is_only_the_added_key():
    before = made(10.1, 11, added=0.09)
    first, second, mechanical, verdict = said(made(10), SEVERITIES, made(10, 11, added=0.1), before)
    assert "10.00 px far on clean images, and 10.50, 11.00, 11.50, 12.00, 13.00 px under fog" in first
    assert "+3.00 px (95 % interval +3.00 to +3.00)" in first
    assert "1.00 px from the clean one in a mean block, that of dct 0.00 px;" in second and "1.00 and 1.00 px" in second
    assert "its added keys take 10.0 % of the attention. So 0.0 % of the change is in how" in mechanical
    assert "Before it learned anything, the change was -0.90 px" in mechanical
    assert "largely restores it is not seen here: renormalised, dct closes 0.0 % of the gap" in verdict


def test_findings_of_a_corruption_that_shortens_the_distance():
    *_, verdict = said(made(10), [made(9.5), made(9), made(8.5), made(8), made(7)], made(9.3))
    assert "as in the paper, is not seen here." in verdict and "largely restores it holds here in part" in verdict


def test_a_change_that_may_be_chance_is_no_verdict():
    noise = torch.randn(12, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wild = made(10.1)._replace(distance=10.1 + 2 * noise, renormalised=10.1 + 2 * noise)
    assert not attention_distance.change(wild.distance, made(10).distance).excludes_zero
    *_, verdict = said(made(10), [wild] * 5, made(10))
    assert "as in the paper, is not seen here." in verdict


@pytest.mark.parametrize(("steps", "images"), [(1, 12), (8, 4)])
def test_few_steps_or_images_are_no_verdict(steps, images):
    cases = [made(value, images=images) for value in (10, 10.5, 11, 11.5, 12, 13, 10.2)]
    *_, verdict = said(cases[0], cases[1:6], cases[6], adaptation=Adaptation(steps, 0.01))
    assert "largely restores it cannot be judged here: too few images or steps to say" in verdict
    assert ("as in the paper, holds here" in verdict) == (images == 12)


def test_figure(tmp_path):
    subject = tiny_subject()
    weights = {name: t.clone() for name, t in subject.model.state_dict().items()}
    (figure,) = attention_distance.draw(subject, corruption="contrast", method="dct")
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
    assert words["origin"] == subject.origin
    assert "(1 step moved" in words["findings"][-1]
    assert all(torch.equal(t, weights[name]) for name, t in subject.model.state_dict().items())


def test_the_severity_decides_what_is_adapted_to():
    subject, seen = tiny_subject(), []
    real = Subject.adapted

    def noting(self, method, domains, **more):
        seen.extend(domain.key for domain in domains)
        return real(self, method, domains, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subject, "adapted", noting)
        (figure,) = attention_distance.draw(subject, corruption="contrast", method="tent", severity=4)
    assert seen == [("contrast", 4)] and "tent, severity 4" in {row["case"] for row in figure.rows}
    assert figure.protocol["corruption"] == "contrast, severity 4"


def test_a_method_without_added_keys_needs_no_control():
    (figure,) = attention_distance.draw(tiny_subject(), corruption="contrast", method="tent")
    assert len({row["case"] for row in figure.rows}) == 7 and not any(row["on_added"] for row in figure.rows)
    assert "Dashed" not in figure.caption


def test_unknown_names_are_errors():
    with pytest.raises(AcclimateError, match="fogg"):
        attention_distance.draw(tiny_subject(), corruption="fogg")
    with pytest.raises(ConfigError, match="Unknown method 'dtc'"):
        attention_distance.draw(tiny_subject(), corruption="fog", method="dtc")
