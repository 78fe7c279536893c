"""The studies of DCT: their grids, their numbers, and that they draw."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

import acclimate
from acclimate.analysis import studies
from acclimate.analysis.scene import Scene, _read, predicted
from acclimate.core.engine import entropy
from acclimate.core.registry import create
from acclimate.data.domains import Images
from acclimate.errors import ConfigError
from acclimate.evaluation.cost import Cost
from acclimate.testing.check import SIZES, tiny_batches, tiny_vit

QUIET = Console(quiet=True)
CORRUPTIONS = ["brightness", "contrast"]


@pytest.fixture
def scene():
    """Random pictures for the tiny ViT, with the labels that it gives them under the first corruption."""
    pixels = np.random.RandomState(0).randint(0, 256, (24, SIZES.image, SIZES.image, 3), dtype=np.uint8)
    images = Images(pixels, np.zeros(24, dtype=np.int64), np.arange(24))
    made = Scene(
        tiny_vit(),
        images,
        True,
        "tiny",
        (0.5,) * 3,
        (0.5,) * 3,
        1,
        "cifar-10-c",
        classes=tuple(map(str, range(SIZES.classes))),
    )
    labels = predicted(made.source, made.batch(CORRUPTIONS[0])).numpy()
    return replace(made, images=images._replace(labels=labels))


def test_a_radius_of_zero_is_a_plain_step_on_the_entropy():
    model, (images,) = tiny_vit(), tiny_batches(count=1)
    adapter = acclimate.adapt(tiny_vit(), "sar", rho=0.0, margin=10.0, lr=0.1, momentum=0.0, recovery=0.0, guard=None)
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
    adapter = acclimate.adapt(tiny_vit(), "dct", margin=math.log(SIZES.classes), guard=None)
    adapter(images)
    assert adapter.record.used == len(images)
    adapter = acclimate.adapt(tiny_vit(), "dct", guard=None)
    adapter(images)
    assert adapter.record.used < len(images), "else the filter would not be there to be left out"


def test_results_belong_to_their_variant_and_corruption(scene, tmp_path):
    before = {name: tensor.clone() for name, tensor in scene.source.state_dict().items()}
    variants = {"one": ("source", {}), "two": ("tent", {"lr": 0.5}), "three": ("source", {})}
    how = dict(severity=None, seed=0, store=tmp_path, console=QUIET)
    outcomes = studies.run_all(scene, CORRUPTIONS, variants, **how)
    truth = [
        100 * float((predicted(scene.source, scene.batch(name)).numpy() == scene.images.labels).mean())
        for name in CORRUPTIONS
    ]
    assert truth[0] == 100 > truth[1]
    assert studies.top1(outcomes["one"]) == studies.top1(outcomes["three"]) == pytest.approx(truth)
    assert [o.spec.method for o in outcomes["two"]] == ["tent", "tent"]
    assert len(list(tmp_path.glob("*/result.json"))) == 4, "the same run is made once"
    assert all(o.found for each in studies.run_all(scene, CORRUPTIONS, variants, **how).values() for o in each)
    assert all(torch.equal(tensor, before[name]) for name, tensor in scene.source.state_dict().items())


def test_accuracy_needs_the_labels_of_the_model(scene, tmp_path):
    with pytest.raises(ConfigError, match=r"have no classes.*has 10 classes"):
        studies.sensitivity(replace(scene, labelled=False), CORRUPTIONS, store=tmp_path)
    with pytest.raises(ConfigError, match="are in 3 folders"):
        studies.ablation(replace(scene, classes=("a", "b", "c")), CORRUPTIONS, store=tmp_path)


def test_a_scene_counts_the_folders_that_no_picture_was_taken_from(tmp_path):
    from PIL import Image

    for name in "abcd":
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "picture.png")
    images, classes = _read(tmp_path, lambda picture: np.asarray(picture), 2, None)
    assert (len(images.labels), classes) == (2, ("a", "b", "c", "d"))


@pytest.mark.parametrize("options", [{}, {"init": "zero", "lr_generator": 0.5}])
def test_an_ablation_changes_one_thing_of_the_tuned_method(options):
    scene = Scene.open(count=10)
    groups = studies.parts(replace(scene, options={"dct": options}))
    assert list(groups["blocks"]) == [f"first {n} of 12 blocks" for n in (3, 6, 9, 12)]
    base = create("dct", options).config
    same = set()
    for name, (method, given) in [pair for group in groups.values() for pair in group.items() if pair[1][0] == "dct"]:
        config = create(method, given).config
        different = [key for key in base if config[key] != base[key]]
        assert len(different) <= 1, name
        if not different:
            same.add(name)
    assert same == {
        "DCT", "queries, keys and values", "first 9 of 12 blocks", "start at zero" if options else "random start",
    }  # fmt: skip


def outcome(accuracy, samples=100, events=()):
    return SimpleNamespace(result=SimpleNamespace(mean=accuracy, samples=samples, events=list(events)))


def test_findings_name_the_best_rate_and_what_is_as_good():
    curve = {rate: [outcome(0.5), outcome(0.5)] for rate in studies.RATES} | {0.1: [outcome(0.6), outcome(0.8)]}
    words = " ".join(studies.rate_findings(curve, [outcome(0.4)], [outcome(0.3)]))
    assert "best at a rate of 0.1 with 70.0 %; SAR has 40.0 %, Source 30.0 %" in words
    assert "from 0.1 to 0.1 are within the standard error of that (4.6 points)" in words
    assert "at most 20.00 points" in words and "0.01, is 20.00 points below" in words


def test_only_recoveries_are_counted():
    assert studies.recoveries([outcome(1, events=[(3, "recovered"), (4, "skipped")]), outcome(1)]) == 1


def test_the_figures_are_drawn_and_their_numbers_kept(scene, tmp_path):
    how = dict(severity=None, seed=0, console=QUIET, store=tmp_path / "runs")
    for draw, rows in ((studies.sensitivity, 2 + len(studies.RATES)), (studies.ablation, 16)):
        figure = draw(scene, CORRUPTIONS, **how)
        assert len(figure.rows) == rows * len(CORRUPTIONS)
        assert {row["accuracy"] for row in figure.rows if row["variant"] == "Source"} > {100.0}
        assert figure.protocol["corruptions"] == "brightness/1, contrast/1" and figure.protocol["guard"] == "off"
        assert all(path.stat().st_size for path in figure.save(tmp_path))
    assert all(row["difference"] == 0 for row in figure.rows if row["variant"] == "DCT")
    assert any("the scores of all pictures are the same" in finding for finding in figure.findings)


def test_methods_that_cannot_run_are_listed_with_the_reason(scene, monkeypatch):
    monkeypatch.setattr(studies, "list_methods", lambda: ["source", "tent", "sar", "dct", "eata"])
    figure = studies.cost(scene, console=QUIET, rounds=1)
    rows = {row["method"]: row for row in figure.rows}
    assert "statistics" in rows["eata"]["not_run"] and rows["eata"]["ratio"] is None
    assert rows["dda"]["not_run"] and rows["dda"]["paper_minutes"] == 7200
    assert (rows["tent"]["forward"], rows["tent"]["backward"], rows["tent"]["not_run"]) == (1, 1, "")
    assert "eata" in figure.caption and "in the paper 1.14 times" in " ".join(figure.findings)


def test_a_cost_is_the_median_of_steps_in_passes_around_them(monkeypatch):
    from acclimate.evaluation import cost

    # plain, step, plain; each begins and ends: rounds of 4, 8 and 2 passes, of which the last plain ones differ
    durations = iter([1, 4, 1, 1, 8, 1, 2, 6, 4])
    clock = [0.0]
    ends = [False]

    def now():
        clock[0] += next(durations) if ends[0] else 0
        ends[0] = not ends[0]
        return clock[0]

    model = tiny_vit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=now))
    found = cost.measure(model, "sar", tiny_batches(count=4), options={"margin": 10.0}, guard=None)
    assert (found.ratio, found.least, found.most, found.seconds, found.rounds) == (4, 2, 8, 6, 3)
    assert (found.forward, found.backward) == (2, 2)
    assert isinstance(found, Cost)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
