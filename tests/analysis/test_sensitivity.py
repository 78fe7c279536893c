"""The figure of the learning rate: its words, and that it is drawn."""

from __future__ import annotations

import numpy as np
from subjects import labelled_subject

from acclimate.analysis import sensitivity
from acclimate.analysis.intervals import Adaptation
from acclimate.analysis.variants import Scored


def scored(share, images=100, steps=8):
    """Return a variant that is right on the first images under both of two corruptions."""
    return Scored([], np.tile(np.arange(images) < share * images, (2, 1)), Adaptation(steps, 0.01))


def said(curve, images=100):
    values = {rate: scored(0.5, images) for rate in sensitivity.RATES} | curve
    return " ".join(sensitivity.findings(values, scored(0.4, images), scored(0.3, images)))


def test_findings_name_the_best_rate_and_what_is_as_good():
    words = said({0.1: scored(0.7), 1.0: scored(0.69)})
    assert "best at a rate of 0.1 with 70.0 %; SAR has 40.0 %, Source 30.0 %" in words
    assert "gains +30.0 points (95 % interval +20." in words
    assert "may be 0 for 0.1, 1." in words
    assert "brings +20.00 points" in words and "paper's best rate, 0.01, the best here differs by +20.00 points" in words
    assert "not seen" not in words


def test_equal_rates_are_not_called_different():
    words = said({})
    assert "may be 0 for 1e-05, 0.0001, 0.001, 0.01, 0.1, 1." in words
    assert "a gain is not seen" in words and "a difference is not seen" in words


def test_few_images_or_steps_are_no_verdict():
    for words in (said({0.1: scored(0.9, 8)}, images=8), said({0.1: scored(0.7, steps=2)})):
        assert words.endswith("There are too few images or steps to say which rates are better than others.")


def test_figure(tmp_path):
    (figure,) = sensitivity.draw(labelled_subject(), corruptions=["brightness", "contrast"], severity=3)
    assert len(figure.rows) == 2 * (2 + len(sensitivity.RATES)) and figure.rows[0]["domain"] == "brightness/3"
    assert figure.protocol["corruptions"] == "brightness/3, contrast/3" and figure.protocol["guard"] == "off"
    assert all(path.stat().st_size for path in figure.save(tmp_path))
