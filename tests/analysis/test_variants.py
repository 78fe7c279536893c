"""Variants are run on the same images, and compared image by image."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from subjects import labelled_subject

from acclimate.analysis.intervals import Adaptation
from acclimate.analysis.subject import predicted
from acclimate.analysis.variants import Scored, recoveries, require_labels, run_variants
from acclimate.errors import ConfigError, StateError

CORRUPTIONS = ["brightness", "contrast"]
MANY = Adaptation(8, 0.01)
VARIANTS = {"one": ("source", {}), "two": ("tent", {"lr": 0.5}), "three": ("source", {})}


def test_results_belong_to_their_variant_and_corruption(tmp_path):
    subject = labelled_subject(24, runs=tmp_path)
    before = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    scored = run_variants(subject, CORRUPTIONS, VARIANTS, severity=1, seed=0)
    right = [predicted(subject.model, subject.batch(name, 1)).numpy() == subject.domain().labels for name in CORRUPTIONS]
    assert right[0].all() and not right[1].all()
    assert (scored["one"].right == right).all() and (scored["three"].right == right).all()
    assert scored["one"].accuracies == pytest.approx([100 * each.mean() for each in right])
    assert [outcome.spec.method for outcome in scored["two"].outcomes] == ["tent", "tent"]
    assert all(100 * o.result.mean == pytest.approx(a) for o, a in zip(scored["two"].outcomes, scored["two"].accuracies))
    assert scored["two"].adaptation.steps == 1 and scored["two"].adaptation.drift > 0 == scored["one"].adaptation.drift
    assert len(list(tmp_path.glob("*/result.json"))) == 4, "the same run is made once"
    again = run_variants(subject, CORRUPTIONS, VARIANTS, severity=1, seed=0)
    assert all(outcome.found for each in again.values() for outcome in each.outcomes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in subject.model.state_dict().items())


def test_without_a_folder_nothing_is_kept():
    scored = run_variants(labelled_subject(24), CORRUPTIONS[:1], {"one": ("source", {})}, severity=1, seed=0)
    assert scored["one"].mean == 100 and not scored["one"].outcomes[0].folder.exists()


def test_a_run_without_its_steps_is_named(tmp_path):
    subject = labelled_subject(24, runs=tmp_path)
    scored = run_variants(subject, CORRUPTIONS[:1], {"one": ("source", {})}, severity=1, seed=0)
    (scored["one"].outcomes[0].folder / "steps.jsonl").unlink()
    with pytest.raises(StateError, match=r"steps\.jsonl cannot be read"):
        run_variants(subject, CORRUPTIONS[:1], {"one": ("source", {})}, severity=1, seed=0)


def test_differences_are_paired_over_images():
    """A gain on the same images is certain where the accuracies alone would not tell."""
    rng = np.random.default_rng(0)
    base = rng.random((2, 200)) < 0.5
    better = base | (rng.random((2, 200)) < 0.1)
    gain = Scored([], better, MANY).over(Scored([], base, MANY))
    assert gain.excludes_zero and gain.mean == pytest.approx(Scored([], better, MANY).mean - Scored([], base, MANY).mean)
    assert gain.images == 200 and gain.high - gain.low < 8
    assert not Scored([], base, MANY).over(Scored([], base, MANY)).excludes_zero


def test_accuracy_needs_the_labels_of_the_model():
    with pytest.raises(ConfigError, match=r"have no classes.*has 10 classes"):
        require_labels(labelled_subject(classes=()))
    with pytest.raises(ConfigError, match="are in 3 folders"):
        require_labels(labelled_subject(classes=("a", "b", "c")))


def test_only_recoveries_are_counted():
    events = [[(3, "recovered"), (4, "skipped")], []]
    outcomes = [SimpleNamespace(result=SimpleNamespace(events=each)) for each in events]
    assert recoveries(outcomes) == 1
