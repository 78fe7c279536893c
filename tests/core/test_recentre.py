"""Recentring: the centre of a stream, and what it does to the passes of every method."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import acclimate
from acclimate.core.recentre import BLOCK, GROUP, WINDOW, Recentring, form_of
from acclimate.errors import ConfigError, ModelError
from acclimate.models.families import view_of
from acclimate.testing.check import CHECKS, SIZES, Case, assert_identical, tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model, vit_methods

pytestmark = pytest.mark.numerics
FORMS = ("mean", "class", "order")


def recentring(form, classes=10, width=8):
    """Return an empty centre for features of a given width, in float64, and the weight and bias of a head."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    view = view_of(double_model())
    view._head = nn.Linear(width, classes).double()
    return Recentring(view, classes, form), weight


def features_of(labels, weight, shift=0.0, noise=0.3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return 3 * weight[labels] + noise * torch.randn(len(labels), weight.shape[1], generator=generator).double() + shift


def observe(centre, features, weight, size=64):
    for part in features.split(size):
        centre.observe(part, part @ weight.T, weight)
    return centre


def test_the_mean_has_weights_that_fall_with_age():
    centre, weight = recentring("mean")
    features = features_of(torch.arange(40) % 10, weight)
    observe(centre, features, weight, 10)
    age = 10 * (3 - torch.arange(40) // 10)
    weights = torch.exp(-age.double() / WINDOW)
    assert_exact(centre.centre, (weights[:, None] * features).sum(0) / weights.sum())


def test_the_class_form_subtracts_what_follows_the_expected_rows():
    centre, weight = recentring("class")
    features = features_of(torch.zeros(30, dtype=torch.long), weight, shift=0.5)
    centre.observe(features, features @ weight.T, weight)
    rows = (features @ weight.T).softmax(-1) @ weight
    f, g = features - features.mean(0), rows - rows.mean(0)
    away = rows.mean(0) - weight.mean(0)
    slope = (f * g).sum() / (g * g).sum()
    smallest = features.mean(0) @ away / (away @ away)
    slope = min(max(0.0, float(slope)), max(0.0, float(smallest)))
    expected = features.mean(0) - slope * away
    share = (features @ weight.T).softmax(-1).mean(0)
    unknown = slope**2 * (weight - weight.mean(0)).square().sum(1).mean() * (share.square().sum() - 0.1)
    assert_exact(centre.centre, expected * max(0.0, 1 - float(unknown / expected.square().sum())))


def test_sums_do_not_depend_on_how_a_stream_is_cut_into_groups_of_batches():
    """A batch that equals a group gives the same order statistic as its halves."""
    whole, weight = recentring("order")
    halves, _ = recentring("order")
    features = features_of(torch.arange(4 * GROUP) % 10, weight)
    observe(whole, features, weight, GROUP)
    observe(halves, features, weight, GROUP // 2)
    assert_exact(halves.order.ratio(), whole.order.ratio())


@pytest.mark.parametrize("size", [1, 16, 64, 100])
def test_a_sorted_stream_is_told_from_a_random_one(size):
    labels = torch.arange(1280) % 10
    for order, least, most in ((torch.randperm(1280, generator=torch.Generator().manual_seed(3)), 0.0, 2.0),
                               (torch.argsort(labels, stable=True), 10.0, math.inf)):  # fmt: skip
        centre, weight = recentring("order")
        observe(centre, features_of(labels[order], weight), weight, size)
        assert least < centre.order.ratio() < most
        assert (centre.order.share() == 0) == (least == 0)


def test_before_two_groups_are_complete_the_classes_are_corrected_for():
    centre, weight = recentring("order")
    observe(centre, features_of(torch.arange(GROUP + 10) % 10, weight), weight, 1)
    assert centre.order.ratio() == math.inf and centre.order.share() == 1


def test_a_stream_of_one_class_keeps_its_class():
    """The mean form takes the class for the displacement; the other forms do not."""
    labels = torch.full((256,), 3)
    right = {}
    for form in FORMS:
        centre, weight = recentring(form)
        features = features_of(labels, weight)
        observe(centre, features, weight)
        right[form] = float((((features - centre.centre) @ weight.T).argmax(-1) == labels).double().mean())
    assert right["mean"] < 0.5 and right["class"] > 0.95 and right["order"] > 0.95


def test_a_stream_of_one_class_that_resembles_others_keeps_its_class():
    """Without the mean, images of a class that is between others look like several classes, but are not sure ones."""
    centre, weight = recentring("order")
    generator = torch.Generator().manual_seed(2)
    mixture = torch.rand(256, 3, generator=generator).double() @ weight[[1, 2, 4]]
    noise = features_of(torch.zeros(256, dtype=torch.long), 0 * weight)
    features = 5 * weight[3] + 1.2 * (mixture - mixture.mean(0)) + noise
    observe(centre, features, weight)
    information, doubt = (float(x / centre.order.images) for x in (centre.order.information, centre.order.doubt))
    assert information > 0.25 and doubt < 0.25  # as much information as predictions of many classes may contain
    assert centre.order.share() == 1
    right = ((features - centre.displacement(features, weight)) @ weight.T).argmax(-1) == 3
    assert float(right.double().mean()) > 0.95


def test_the_first_image_of_a_stream_is_predicted():
    """It is the whole mean of the stream. With that as the centre, nothing would be left of it."""
    centre, weight = recentring("order")
    image = features_of(torch.tensor([3]), weight)
    observe(centre, image, weight)
    predicted = (image - centre.displacement(image, weight)) @ weight.T
    assert predicted.argmax() == 3 and float(predicted.softmax(-1).max()) > 0.9


def test_fog_after_clear_images_is_not_taken_for_one_class():
    """The displacement leaves a little information about many classes, and the corrected predictions are not quite sure."""
    centre, _ = recentring("order")
    order = centre.order
    order.images.fill_(256.0), order.groups.fill_(16.0), order.squared_groups.fill_(16.0)
    order.within.fill_(256.0), order.between.fill_(16.0)
    many, one = [(0.28, 0.33), (0.2, 0.5), (0.9, 0.05)], [(0.34, 0.23), (0.2, 0.4), (0.6, 0.1)]
    for information, doubt in many + one:
        order.information.fill_(256 * information), order.doubt.fill_(256 * doubt)
        assert order.share() == float((information, doubt) in one)


def test_an_image_is_displaced_by_its_own_part_of_the_centre():
    for form in FORMS:
        centre, weight = recentring(form)
        centre.centre.copy_(torch.arange(8.0))
        along = torch.tensor([-1.0, 0.0, 0.4, 2.0, 7.0])[:, None] * centre.centre
        across = torch.tensor([3.0, 0, 0, 0, 0, 0, 0, 0])
        expected = torch.tensor([0.0, 0.0, 0.4, 2.0, 2.0] if form == "order" else [1.0] * 5)[:, None] * centre.centre
        assert_exact(centre.displacement(along + across, weight), expected)


def test_what_is_due_to_the_class_of_an_image_is_no_displacement():
    """All images are displaced in the direction in which two classes differ."""
    weight = torch.eye(2, 8).double() - torch.eye(2, 8).double().flip(0)
    labels, shift = torch.arange(256) % 2, torch.zeros(8).double()
    shift[0], shift[5] = 1.0, 0.5
    centre, _ = recentring("order", classes=2)
    features = features_of(labels, weight, shift, noise=0.1)
    observe(centre, features, weight)
    displacement = centre.displacement(features, weight)
    assert torch.allclose(displacement, centre.centre.expand_as(features), atol=0.3)
    own = (features @ centre.centre / centre.centre.square().sum()).clamp(0, 2)[:, None] * centre.centre
    assert (own - centre.centre).norm(dim=1).min() > 1  # with the part of the class, no displacement was right


def shares_kept(centre, features, weight, size):
    """Return what the centre kept of the earlier images at each batch."""
    found = []
    for part in features.split(size):
        observe(centre, part, weight, size)
        found.append(centre.kept)
    return found


@pytest.mark.parametrize("met", [128, 800])
@pytest.mark.parametrize("size", [1, 16, 32, 64, 100])
def test_a_centre_forgets_another_domain_after_a_block(size, met):
    generator = torch.Generator().manual_seed(0)
    shifts = 2 * torch.randn(2, 8, generator=generator).double()
    labels = torch.randint(10, (2, 800), generator=generator)
    centre, weight = recentring("order")
    one, other = (features_of(each, weight, shift, seed=i) for i, (each, shift) in enumerate(zip(labels, shifts)))
    assert set(shares_kept(centre, one[:met], weight, size)) == {1.0}
    first = 2 * max(BLOCK, size)  # a block may have begun before the change
    assert min(shares_kept(centre, other[:first], weight, size)) < 0.2
    fresh, _ = recentring("order")
    observe(fresh, other[:first], weight, size)
    assert (centre.mean - fresh.mean).norm() < 0.25 * (shifts[0] - shifts[1]).norm()
    assert (centre.prediction - fresh.prediction).abs().max() < 0.1
    assert set(shares_kept(centre, other[first:], weight, size)) == {1.0}


def test_a_block_is_the_same_however_it_is_cut_into_batches():
    """What is kept, and the mean after a change, depend on the images alone, apart from the age within the block."""
    kept, means = [], []
    for size in (1, 8, 48):
        centre, weight = recentring("order")
        centre.window = 1e9
        images = torch.cat([features_of(torch.arange(480) * 7 % 10, weight, shift) for shift in (0.0, 2.0)])
        kept.append([share for share in shares_kept(centre, images, weight, size) if share < 1])
        means.append(centre.mean.clone())
    assert len(kept[0]) == 1
    for share, mean in zip(kept[1:], means[1:]):
        assert_exact(share[0], kept[0][0])
        assert_exact(mean, means[0])


@pytest.mark.parametrize("form", FORMS)
def test_another_class_is_not_taken_for_another_domain(form):
    """In a stream that is sorted by class, the mean of a batch says nothing about the domain."""
    centre, weight = recentring(form)
    labels = torch.arange(10).repeat_interleave(128)
    assert set(shares_kept(centre, features_of(labels, weight, 0.5), weight, 64)) == {1.0}


def test_few_images_do_not_show_another_domain():
    centre, weight = recentring("order")
    observe(centre, features_of(torch.arange(256) % 10, weight), weight)
    observe(centre, features_of(torch.arange(BLOCK - 1) % 10, weight, shift=50.0), weight)
    assert centre.kept == 1.0


def test_images_that_all_look_alike_say_little_about_the_classes_of_a_stream():
    """Noise is predicted as one class for sure. It does not hide the doubt and the information of the images after it."""
    generator = torch.Generator().manual_seed(0)
    many = torch.randn(2 * GROUP, 10, generator=generator).double()
    after, alone = (recentring("order")[0].order for _ in range(2))
    sure = 9.0 * torch.eye(10)[:1].expand(GROUP, 10).double()
    for _ in range(8):
        after.add(sure + 1e-3 * many[:GROUP], 0 * sure, sure)
    assert after.share() == 1
    for order in (after, alone):
        order.add(many, 2 * many, many)
    for name in ("information", "doubt"):
        known, expected = (float(getattr(order, name) / order.within) for order in (after, alone))
        assert known == pytest.approx(expected, abs=1e-4) and expected > 0.25


@pytest.mark.parametrize("form", FORMS)
def test_a_displacement_of_all_features_is_removed(form):
    centre, weight = recentring(form)
    labels = torch.randint(10, (640,), generator=torch.Generator().manual_seed(5))
    shift = 4 * weight[0]  # towards one class, as under fog
    features = features_of(labels, weight, shift=shift)
    observe(centre, features, weight)
    before = (features @ weight.T).argmax(-1) == labels
    after = ((features - centre.centre) @ weight.T).argmax(-1) == labels
    assert before.double().mean() < 0.7 and after.double().mean() > before.double().mean() + 0.1


def test_a_source_model_with_the_mean_form_is_neo():
    a = acclimate.adapt(double_model(), "source", recentre="mean")
    b = acclimate.adapt(double_model(), "neo")
    images = double_batches(1)[0]
    assert_exact(a(images), b(images))
    with a.frozen(), b.frozen():
        assert_exact(a(images[:2]), b(images[:2]))


def test_the_loss_has_the_earlier_centre_and_the_logits_have_the_new_one():
    first, second = double_batches(2)
    adapter = acclimate.adapt(double_model(), "tent", recentre="mean", lr=0.01)
    source = double_model()
    weight, bias = view_of(source).head.weight, view_of(source).head.bias
    with torch.no_grad():
        features = view_of(source).features(first)[0]
    assert_exact(adapter(first), (features - features.mean(0)) @ weight.T + bias)
    assert adapter.record is not None
    expected = acclimate.core.engine.entropy((features - features.mean(0)) @ weight.T + bias).mean()
    assert_exact(adapter.record.loss, expected)
    old, parameters = adapter.recentring.centre.clone(), [p.clone() for p in adapter.engine.adapted.tensors]
    logits = adapter(second)
    new = adapter.recentring.centre.clone()
    with torch.no_grad():
        for p, before in zip(adapter.engine.adapted.tensors, parameters):
            p.copy_(before)
        features = adapter.engine.view.features(second)[0]
    assert_exact(logits, (features - new) @ weight.T + bias)
    assert_exact(adapter.record.loss, acclimate.core.engine.entropy((features - old) @ weight.T + bias).mean())


@pytest.mark.parametrize("method", ["source", "tent", "dct", "eta", "t3a"])
def test_no_pass_is_added_but_for_the_first_batch(method):
    counts = {}
    for recentre in (False, True):
        adapter = acclimate.adapt(tiny_model(), method, recentre=recentre, micro_batch=2, guard=None)
        passes = []
        for images in tiny_batches(3):
            before = adapter.engine.passes.forward - adapter.engine.passes.backward
            adapter(images)
            passes.append(adapter.engine.passes.forward - adapter.engine.passes.backward - before)
        counts[recentre] = passes
    learns = bool(adapter.engine.adapted.tensors)
    if method in ("source", "tent", "t3a"):  # what the others pass again depends on the samples that they keep
        assert counts[True] == [counts[False][0] + (6 if learns else 0), *counts[False][1:]]
    else:
        assert counts[True][1] <= 2 * 6


@pytest.mark.parametrize("method", vit_methods())
def test_every_method_moves_the_centre_and_returns_to_the_beginning(method):
    images = tiny_batches(1)[0]
    views = acclimate.core.registry.find_method(method).info.views
    adapter = Case(acclimate.core.registry.find_method(method), options={"recentre": True}).wrap()
    images = images if views == 1 else torch.stack([images] * views, dim=1)
    before = adapter.state.capture()
    for _ in range(2):
        assert adapter(images).isfinite().all()
    assert adapter.recentring.centre.abs().sum() > 0
    assert float(adapter.recentring.images) > len(images)
    with adapter.frozen():
        adapter(images)
    adapter.reset()
    assert_identical(adapter.state.capture(), before, "after reset")


def test_conformance_with_recentring():
    for check in CHECKS.values():
        check(Case(acclimate.core.registry.find_method("tent"), options={"recentre": True, "lr": 0.01}))


def test_the_classes_of_the_target_alone_count():
    classes = [0, 2, 3]
    adapter = acclimate.adapt(double_model(), "source", recentre="class", classes=classes)
    images = double_batches(1)[0]
    view = view_of(double_model())
    with torch.no_grad():
        features = view.features(images)[0]
        weight, bias = view.head.weight[classes], view.head.bias[classes]
        centre = Recentring(view, 3, "class")
        centre.observe(features, features @ weight.T + bias, weight)
        assert_exact(adapter(images), (features - centre.centre) @ weight.T + bias)


def test_a_method_decides_by_default():
    assert form_of(None, None) is None and form_of(None, "mean") == "mean"
    assert form_of(True, None) == "order" and form_of(False, "mean") is None
    assert acclimate.adapt(tiny_model(), "tent").recentring is None


def test_what_cannot_be_recentred_is_refused():
    with pytest.raises(ConfigError, match="recentre='median': choose True, False, \"mean\""):
        acclimate.adapt(tiny_model(), "tent", recentre="median")
    with pytest.raises(ConfigError, match="leave out compile="):
        acclimate.adapt(tiny_model(), "tent", recentre=True, compile="eager")

    class Curved(nn.Linear):
        def forward(self, features):
            return super().forward(features).tanh()

    model = tiny_model()
    model.head = Curved(model.head.in_features, SIZES.classes)
    with pytest.raises(ModelError, match="not a linear function"):
        acclimate.adapt(model, "tent", recentre=True)


def test_a_failed_step_leaves_the_centre_alone():
    adapter = acclimate.adapt(tiny_model(), "tent", recentre=True)
    adapter(tiny_batches(1)[0])
    before = adapter.state.capture()
    with pytest.raises(acclimate.errors.InputError):
        adapter(torch.full((2, 3, SIZES.image, SIZES.image), math.nan))
    assert_identical(adapter.state.capture(), before, "after a bad batch")
