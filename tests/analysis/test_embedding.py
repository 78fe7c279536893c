"""Class tokens and conditioners are those of the pass, and the two measures are right where the answer is known."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import acclimate
from acclimate.analysis.embedding import FOLDS, conditioned_blocks, embed, frequent, joined, separability, standardised
from acclimate.errors import ConfigError, InputError
from acclimate.models.families import view_of
from acclimate.testing.check import SIZES, tiny_batches, tiny_model
from support import SINGLE, assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
LAYERS = range(1, SIZES.depth + 1)


def images(count: int = 20) -> torch.Tensor:
    return double_batches(1, count)[0]  # more than one part


def test_class_tokens_are_those_behind_the_blocks_and_before_the_head(family):
    model = double_model(family)
    view = view_of(model)
    found = embed(model, images(), layers=LAYERS).class_tokens
    for layer, block in zip(LAYERS, view.blocks):
        outputs = []
        hook = block.module.register_forward_hook(lambda _, __, out, outputs=outputs: outputs.append(out[:, 0]))
        with torch.no_grad():
            features = view.features(images())[0]
        hook.remove()
        expected = features if layer == SIZES.depth else outputs[0]
        assert_exact(found[layer], expected, f"layer {layer}")


def test_an_adapter_that_learned_nothing_has_the_tokens_of_its_source(family):
    expected = embed(double_model(family), images(), layers=LAYERS).class_tokens
    found = embed(acclimate.adapt(double_model(family), "source"), images(), layers=LAYERS).class_tokens
    for layer in LAYERS:
        assert_exact(found[layer], expected[layer], f"layer {layer}")


@pytest.mark.parametrize("method", ["dct", "cotta"])
def test_the_head_makes_the_logits_of_the_last_layer_and_looking_changes_nothing(method):
    adapter = acclimate.adapt(double_model(), method, mean=0.5, std=0.5)
    for batch in tiny_batches():
        adapter(batch)
    before = adapter.snapshot()
    whole = adapter.engine.samples_interact
    last = torch.from_numpy(embed(adapter, images(), layers=[SIZES.depth]).class_tokens[SIZES.depth])
    with adapter.frozen():
        logits = adapter(images())
    # CoTTA predicts by its teacher, head included
    teacher = adapter.engine.adapted.using(adapter.method.teacher.weights) if method == "cotta" else nullcontext()
    head = adapter.engine.view.head
    with teacher, torch.no_grad():  # the tokens were rounded to float32
        assert ((head(last.double()) - logits).abs() <= SINGLE * last.double().abs() @ head.weight.abs().T).all()
    after = adapter.snapshot()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert adapter.engine.samples_interact == whole


def test_conditioners_are_what_attention_appends(family):
    adapter = acclimate.adapt(double_model(family), "dct")
    for batch in tiny_batches():
        adapter(batch)
    blocks = conditioned_blocks(adapter)
    assert blocks[:2] == [0, 1]
    found = embed(adapter, images(), layers=[1], blocks=blocks).conditioners
    attention = adapter.engine.view.blocks[1].open()
    appended = []
    real = attention.extra
    attention.extra = lambda token: appended.append(real(token)) or appended[-1]
    with torch.no_grad():
        adapter.engine.view.logits(images())
    attention.extra = real
    for part, vectors in zip("kv", appended[0]):
        assert found[1, part].shape == (20, SIZES.width)
        assert_exact(found[1, part], vectors.flatten(1), part)
    weights, biases = (getattr(adapter.method.generators["1"], name)["q"].detach().numpy() for name in ("weights", "biases"))
    rounded = SINGLE * (np.abs(found[1, "input"]) @ np.abs(weights).T + np.abs(found[1, "q"]))
    assert (np.abs(found[1, "input"] @ weights.T + biases - found[1, "q"]) <= rounded).all()
    # the first block has one class token for all images, and so one set of conditioners
    first, second = (np.ptp(found[block, "k"], axis=0).max() for block in (0, 1))
    assert first <= SINGLE * np.abs(found[0, "k"]).max() < second


def test_only_a_generator_makes_conditioners():
    assert conditioned_blocks(tiny_model()) == []
    assert conditioned_blocks(acclimate.adapt(tiny_model(), "tent")) == []
    assert conditioned_blocks(acclimate.adapt(tiny_model(), "dct", generator=False)) == []
    assert conditioned_blocks(acclimate.adapt(tiny_model(), "dct", blocks=[1, 2])) == [1, 2]


def test_a_layer_or_block_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=f"layers: 0 is not one of 1 to {SIZES.depth}"):
        embed(tiny_model(), images(), layers=[0])
    with pytest.raises(ConfigError, match="blocks: 1 has no conditioners \\(none of"):
        embed(tiny_model(), images(), layers=[1], blocks=[1])
    with pytest.raises(InputError, match="Expected images"):
        embed(tiny_model(), images()[:, :1], layers=[1])


def test_joined_keeps_the_order():
    parts = [embed(double_model(), part, layers=[2]) for part in images().split(13)]
    assert_exact(joined(parts).class_tokens[2], embed(double_model(), images(), layers=[2]).class_tokens[2])


def points(kinds: np.ndarray, shift: float, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=(len(kinds), 6))
    noise[:, 0] += shift * kinds
    return noise.astype(np.float32)


def test_far_groups_are_told_apart_and_equal_ones_are_not():
    kinds, which = np.repeat([0, 1], 100), np.tile(np.arange(100), 2)
    far, none = (separability(points(kinds, shift), kinds, which) for shift in (50.0, 0.0))
    assert far.accuracy == 1 and (far.interval().low, far.interval().high) == (1, 1) and far.chance == 0.5
    assert far.over(none).excludes_zero and not none.over(none).excludes_zero
    assert abs(none.accuracy - 0.5) < 0.12 and abs(none.silhouette) < 0.02
    # one of six equally wide dimensions separates: within a kind the others have a squared distance of 2 x 5
    a, b = np.sqrt(10), np.sqrt(14)
    assert far.silhouette == pytest.approx(1 - a / b, abs=0.04)


def test_two_points_have_a_silhouette_of_one():
    kinds = np.repeat([0, 1], 10)
    found = separability(np.eye(2, dtype=np.float32)[kinds], kinds, np.arange(20))
    assert (found.accuracy, found.silhouette) == (1, 1)


def test_equal_points_tell_nothing():
    kinds = np.repeat([0, 1, 2], 10)
    found = separability(np.full((30, 4), 0.1, np.float32), kinds, np.tile(np.arange(10), 3))
    assert found.accuracy == pytest.approx(1 / 3) and found.silhouette == 0


def test_a_image_is_not_recognised_by_its_twin():
    """Classes are noise here, but every image occurs in five versions that are almost the same."""
    rng = np.random.default_rng(0)
    which, labels = np.tile(np.arange(40), 5), np.tile(rng.integers(0, 2, 40), 5)
    twins = rng.normal(size=(40, 60))[which] + 0.01 * rng.normal(size=(200, 60))
    assert separability(twins.astype(np.float32), labels, which).accuracy < 0.75
    assert separability(twins.astype(np.float32), labels, np.arange(200)).accuracy > 0.95


def test_neither_scale_nor_order_matters():
    kinds, which = np.repeat([0, 1], 30), np.tile(np.arange(30), 2)
    plain = points(kinds, 2.0)
    scaled = plain * np.float32([1, 1e3, 1e-3, 7, 5, 2]) + 3
    order = np.random.default_rng(1).permutation(60)
    expected = separability(plain, kinds, which)
    assert separability(scaled, kinds, which).silhouette == pytest.approx(expected.silhouette, abs=1e-3)
    assert separability(plain[order], kinds[order], which[order]).silhouette == pytest.approx(expected.silhouette)
    assert standardised(scaled).std(0) == pytest.approx(np.ones(6))


def test_what_cannot_be_measured_is_refused_or_left_out(monkeypatch):
    some = np.zeros((8, 2), np.float32)
    with pytest.raises(InputError, match="of one kind"):
        separability(some, np.zeros(8, int), np.arange(8))
    with pytest.raises(InputError, match=f"4 images are too few .* at least {FOLDS}"):
        separability(some, np.repeat([0, 1], 4), np.tile(np.arange(4), 2))
    labels, which = np.tile([0] * FOLDS + [1] * (FOLDS - 1), 2), np.tile(np.arange(2 * FOLDS - 1), 2)
    assert frequent(labels, which).tolist() == (labels == 0).tolist()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match="scikit-learn: pip install"):
        separability(some, np.repeat([0, 1], 4), np.arange(8))
