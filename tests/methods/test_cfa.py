"""CFA: closed-form small cases."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import acclimate
from acclimate.core.statistics import source_statistics
from acclimate.errors import ConfigError, NonFiniteError
from acclimate.testing.check import tiny_batches, tiny_model
from support import SINGLE, assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def statistics():
    return made_with(tiny_model())


def made_with(model):
    """Statistics of ten classes, of which the last four have no image."""
    return source_statistics(model, torch.cat(tiny_batches(4, seed=3)), labels=torch.arange(24) % 6, kinds=["features"])


def whole_batch_loss(features, labels, source, moments=3, weights=(1.0, 1.0)):
    """The paper's, as it is written; `source` has one class mean for each label that there can be."""
    h = F.layer_norm(features, features.shape[-1:]).tanh()
    mean = h.mean(0)
    full = (mean - source["mean"]).norm() / 2
    for k in range(2, moments + 1):
        full = full + (((h - mean) ** k).mean(0) - source[f"moment{k}"]).norm() / 2**k
    present = [c for c in labels.unique().tolist() if source["class_counts"][c]]
    by_class = [(h[labels == c].mean(0) - source["class_means"][c]).norm() / 2 for c in present]
    return weights[0] * full + weights[1] * (sum(by_class) / len(by_class) if by_class else 0)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 8),
        ({"classes": [8, 1, 2, 5, 4]}, 8),
        ({"moments": 2, "moment_weight": 0.5, "class_weight": 2.0, "clip": 100.0}, 8),
        ({"clip": 0.05, "reference": True, "micro_batch": 3}, 8),
        ({}, 1),
        ({"classes": [9, 7, 8]}, 4),  # none of which the source has
    ],
)
def test_steps_are_those_of_the_paper(options, size):
    """Against autograd on the whole batch, although ours cuts it."""
    options = {"micro_batch": 2, **options}
    plain, statistics = double_model(), made_with(double_model())
    norms = [p for n, p in plain.named_parameters() if "norm" in n]
    optimizer = torch.optim.SGD(norms, lr=0.01, momentum=0.9)
    model = acclimate.adapt(double_model(), "cfa", source_statistics=statistics, lr=0.01, **options)
    source = statistics.of("features")
    columns = options.get("classes", list(range(10)))
    source |= {name: source[name][columns] for name in ("class_means", "class_counts")}
    weights = options.get("moment_weight", 1.0), options.get("class_weight", 1.0)
    for images in double_batches(4, size=size):
        features = plain.forward_head(plain.forward_features(images), pre_logits=True)
        logits = plain.head(features)[:, columns]
        loss = whole_batch_loss(features, logits.argmax(-1), source, options.get("moments", 3), weights)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(norms, options.get("clip", 1.0))
        optimizer.step()
        assert_exact(model(images), logits)
        assert model.record.used == size
        assert_exact(model.record.loss, loss)
    for ours, theirs in zip(model.engine.adapted.tensors, norms):
        assert_exact(ours, theirs)


def test_the_source_itself_leaves_nothing_to_align():
    """A batch that is the source, with its own predictions as labels, is at distance 0; another one comes nearer."""
    images = tiny_batches(1)[0]
    source = source_statistics(double_model(), images, kinds=["features"])
    model = acclimate.adapt(double_model(), "cfa", source_statistics=source)
    model(images)
    assert model.record.loss < 32**0.5 * SINGLE  # each of a source's 32 means is rounded to float32
    aligned = acclimate.adapt(double_model(), "cfa", source_statistics=source, lr=0.002)
    losses = []
    for _ in range(8):
        aligned(tiny_batches(1, seed=8)[0])
        losses.append(aligned.record.loss)
    assert losses[-1] < 0.97 * losses[0]


def test_the_state_file_keeps_the_statistics(statistics, batches, tmp_path):
    model = acclimate.adapt(tiny_model(), "cfa", source_statistics=statistics, lr=0.01)
    model(batches[0])
    model.save(tmp_path / "state.safetensors")
    again = acclimate.load(tmp_path / "state.safetensors", tiny_model())
    assert torch.equal(again(batches[1]), model(batches[1]))
    assert again.record.loss == model.record.loss


def test_outputs_that_are_not_finite_change_nothing(statistics, batches):
    model = acclimate.adapt(tiny_model(), "cfa", source_statistics=statistics, guard=None)
    model(batches[0])
    before = model.snapshot()
    with torch.no_grad():
        model.engine.view.head.weight.fill_(math.inf)
    with pytest.raises(NonFiniteError):
        model(batches[1])
    after = model.state.capture()
    assert all(torch.equal(after[n], t) for n, t in before.items() if n.startswith(("model/", "method/", "optimizer/")))


def test_without_statistics_it_is_refused(model):
    with pytest.raises(ConfigError, match=r"statistics of the source data \(features\)"):
        acclimate.adapt(model, "cfa")


@pytest.mark.parametrize(
    "options",
    [
        {"lr": None},
        {"lr": math.nan},
        {"moments": 0},
        {"moments": 4},
        {"moments": 1.5},
        {"moment_weight": -1},
        {"class_weight": "x"},
        {"clip": -1},
        {"momentum": 2},
    ],
)
def test_impossible_options_are_refused(options, statistics):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "cfa", source_statistics=statistics, **options)
