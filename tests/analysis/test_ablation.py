"""The ablation of DCT: what is changed, and that it is drawn."""

from __future__ import annotations

import math

import pytest
import torch
from subjects import labelled_subject

import acclimate
from acclimate.analysis import ablation
from acclimate.analysis.subject import Subject
from acclimate.core.engine import entropy
from acclimate.core.registry import create_method
from acclimate.evaluation.testbed import Testbed, open_testbed
from acclimate.testing.check import SIZES, tiny_batches, tiny_model


def test_a_radius_of_zero_is_a_plain_step_on_the_entropy():
    model, (images,) = tiny_model(), tiny_batches(count=1)
    adapter = acclimate.adapt(tiny_model(), "sar", rho=0.0, margin=10.0, lr=0.1, momentum=0.0, recovery=0.0, guard=None)
    adapter(images)
    entropy(model(images)).mean().backward()
    before = dict(model.named_parameters())
    assert adapter.engine.adapted.named
    for name, p in adapter.engine.adapted.named.items():
        source = before[name.removeprefix("model/")]
        assert source.grad.abs().max() > 1e-4
        torch.testing.assert_close(p.detach(), source.detach() - 0.1 * source.grad, rtol=1e-4, atol=1e-6)


def test_a_margin_of_ln_c_lets_every_sample_through():
    (images,) = tiny_batches(count=1)
    adapter = acclimate.adapt(tiny_model(), "dct", margin=math.log(SIZES.classes), guard=None)
    adapter(images)
    assert adapter.record.used == len(images)
    adapter = acclimate.adapt(tiny_model(), "dct", guard=None)
    adapter(images)
    assert adapter.record.used < len(images), "else the filter would not be there to be left out"


@pytest.mark.parametrize("options", [{}, {"init": "zero", "lr_generator": 0.5}])
def test_an_ablation_changes_one_thing_of_the_tuned_method(options):
    bundled = open_testbed()
    groups = ablation.parts(Subject(Testbed(bundled.model, "bundled", bundled.data, lambda size: {"dct": options})))
    assert list(groups["blocks"]) == [f"first {n} of 12 blocks" for n in (3, 6, 9, 12)]
    base = create_method("dct", options).config
    same = set()
    for name, (method, given) in [pair for group in groups.values() for pair in group.items() if pair[1][0] == "dct"]:
        config = create_method(method, given).config
        different = [key for key in base if config[key] != base[key]]
        assert len(different) <= 1, name
        if not different:
            same.add(name)
    assert same == {
        "DCT", "queries, keys and values", "first 9 of 12 blocks", "start at zero" if options else "random start",
    }  # fmt: skip


def test_figure(tmp_path):
    subject = labelled_subject()
    (figure,) = ablation.draw(subject, corruptions=["brightness", "contrast"])
    assert len(figure.rows) == 16 * 2
    assert {row["accuracy"] for row in figure.rows if row["variant"] == "Source"} > {100.0}
    assert figure.protocol["corruptions"] == "brightness/1, contrast/1" and figure.origin == subject.origin
    assert all(path.stat().st_size for path in figure.save(tmp_path))
    assert all(row["difference"] == 0 for row in figure.rows if row["variant"] == "DCT")
    words = " ".join(figure.findings)
    assert "the scores of all images are the same" in words and "That DCT gains over SAR cannot be judged here" in words
