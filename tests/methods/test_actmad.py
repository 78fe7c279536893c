"""ActMAD: steps in closed form, what a source or a batch without spread gives, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.core.statistics import source_statistics
from acclimate.errors import ConfigError, InputError
from acclimate.models.families import view_of
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def statistics():
    return made_with(torch.cat(tiny_batches(3, seed=3)))


def made_with(images):
    return source_statistics(double_model(), images, kinds=["class_tokens"])


def wrapped(statistics, **options):
    return acclimate.adapt(double_model(), "actmad", source_statistics=statistics, **options)


@pytest.mark.parametrize(
    ("options", "size"),
    [({}, 6), ({"weight": 3.0, "lr": 0.02, "momentum": 0.5}, 2), ({"classes": [7, 2], "reference": True}, 5)],
    ids=str,
)
def test_steps_are_sgd_on_the_distance_of_means_and_standard_deviations(statistics, options, size):
    """Against autograd on the whole batch, although ours cuts it."""
    plain, columns = double_model(), options.get("classes", list(range(10)))
    view, source = view_of(plain), statistics.of("class_tokens")
    norms = [p for n, p in plain.named_parameters() if "norm" in n]
    optimizer = torch.optim.SGD(norms, lr=options.get("lr", 0.005), momentum=options.get("momentum", 0.9))
    model = wrapped(statistics, micro_batch=2, **options)
    for images in double_batches(4, size=size):
        tokens, logits = view.class_tokens(images)
        distances = (tokens.mean(0) - source["mean"]).abs() + (tokens.std(0) - source["std"]).abs()
        loss = options.get("weight", 30.0) * distances.sum() / (4 * 32)  # of 4 blocks
        assert_exact(model(images), logits[:, columns])
        assert_exact(model.record.loss, loss)
        assert model.record.used == size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for ours, theirs in zip(model.engine.adapted.tensors, norms, strict=True):
        assert_exact(ours, theirs)


def test_a_batch_that_is_the_source_is_at_distance_zero_and_another_one_comes_nearer():
    source, other = double_batches(2)
    model = wrapped(made_with(source))
    model(source)
    assert model.record.loss < 30 * 1e-6  # the statistics are rounded to float32
    model.reset()
    losses = []
    for _ in range(8):
        model(other)
        losses.append(model.record.loss)
    assert losses[-1] < 0.9 * losses[0]


def test_equal_images_have_no_spread_and_a_finite_gradient(statistics):
    model, images = wrapped(statistics), double_batches(1)[0][:1].expand(4, -1, -1, -1)
    tokens = view_of(double_model()).class_tokens(images)[0].detach()
    source = statistics.of("class_tokens")
    model(images)
    assert_exact(model.record.loss, 30 * ((tokens[0] - source["mean"]).abs().mean() + source["std"].double().mean()))
    assert model.record.drift > 0 and all(p.isfinite().all() for p in model.engine.adapted.tensors)


def test_a_single_image_at_the_end_is_predicted_and_a_stream_of_them_is_refused(statistics):
    model, (images, last) = wrapped(statistics), double_batches(2)
    model(images)
    before = [p.detach().clone() for p in model.engine.adapted.tensors]
    with model.frozen():
        expected = model(last[:1])
    with pytest.raises(InputError, match="actmad compares the spread"):
        wrapped(statistics)(last[:1])
    assert_exact(model(last[:1]), expected)
    assert model.record.used == 0 and model.record.event.startswith("skipped")
    assert all(torch.equal(p, value) for p, value in zip(model.engine.adapted.tensors, before))


def test_the_state_file_keeps_the_statistics(statistics, tmp_path):
    model, (first, second) = wrapped(statistics), double_batches(2)
    model(first)
    model.save(tmp_path / "s.safetensors")
    again = acclimate.load(tmp_path / "s.safetensors", double_model())
    assert torch.equal(again(second), model(second)) and again.record.loss == model.record.loss


def test_without_statistics_it_is_refused():
    with pytest.raises(ConfigError, match=r"statistics of the source data \(class_tokens\)"):
        acclimate.adapt(tiny_model(), "actmad")


@pytest.mark.parametrize("options", [{"lr": None}, {"weight": -1}, {"weight": math.nan}, {"momentum": 2}], ids=str)
def test_impossible_options_are_refused(statistics, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        wrapped(statistics, **options)
