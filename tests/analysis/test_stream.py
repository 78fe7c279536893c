"""The figure of a stream of several shifts: its averages, its numbers, and that it is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from subjects import labelled_subject

from acclimate.analysis import stream
from acclimate.evaluation.store import Store


def test_an_average_does_not_reach_into_the_next_domain():
    band = np.arange(512) < 256
    where, accuracy = stream.smoothed(band)
    assert len(where) == stream.POINTS and where[0] == 0 and where[-1] == 511
    assert accuracy[0] == 100 and accuracy[-1] == 0
    assert accuracy[np.abs(where - 256).argmin()] == pytest.approx(50, abs=2)
    assert stream.smoothed(np.array([True]))[1].tolist() == [100.0]


def test_clean_images_are_no_shift():
    bands = {"keel": [np.ones(4, bool), np.array([True, False]), np.zeros(4, bool), np.array([True, False])]}
    assert stream.shift_means(bands) == {"keel": 25.0}
    assert stream.findings(bands)[1] == "Clean images, before and after the shifts: keel 100.0 and 50.0 %."


def test_figure(tmp_path):
    subject = labelled_subject(runs=tmp_path / "runs")
    (figure,) = stream.draw(subject, corruptions=["brightness", "contrast"], severity=3)
    assert {row["method"] for row in figure.rows} == set(stream.METHODS)
    assert list(dict.fromkeys(row["domain"] for row in figure.rows)) == ["clean", "brightness", "contrast", "clean again"]
    assert all(path.stat().st_size for path in figure.save(tmp_path))
    runs = Store(tmp_path / "runs").outcomes()
    assert {run.spec.setting for run in runs} == {"continual"} and len(runs) == len(stream.METHODS)
    source = next(run.result for run in runs if run.spec.method == "source")
    shifts = [100 * accuracy for key, accuracy in source.per_domain.items() if key.severity == 3]
    assert f"source {np.mean(shifts):.1f} %" in figure.findings[0], "the numbers are those of the runs"
