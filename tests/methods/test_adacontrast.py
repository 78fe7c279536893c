"""AdaContrast: a step by hand, the vote of the neighbours, the ring buffers, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import acclimate
from acclimate.errors import ConfigError
from acclimate.methods._augment import moco_view
from acclimate.methods._bank import ring
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
HOW = dict(mean=0.5, std=0.5)
SMALL = dict(queue=16, neighbours=3, refine_after=8)


def features(model, images):
    x = model.forward_head(model.forward_features(images), pre_logits=True)
    return x, model.head(x)


@pytest.mark.parametrize("reference", [False, True])
def test_the_first_loss_by_hand(reference):
    """On the whole batch at once, with autograd through the mean prediction."""
    images = double_batches()[0]
    weights = dict(alpha=0.7, beta=1.3, eta=0.5)
    model = acclimate.adapt(double_model(), "adacontrast", lr=0.01, reference=reference, **weights, **SMALL, **HOW)
    seen, draw = [], model.method.views
    model.method.views = lambda *a: seen.append(draw(*a)) or seen[-1]
    queue, labels = model.method.queue_features.clone(), model.method.queue_labels.clone()
    logits = model(images)
    ((weak, query, key),) = seen

    plain = double_model()
    with torch.no_grad():
        chosen = plain(weak).argmax(-1)
        k = F.normalize(features(plain, key)[0], dim=-1)  # the average is still the source
    if reference:
        labels[:6] = chosen
    f, z = features(plain, query)
    f = F.normalize(f, dim=-1)
    contrast = torch.cat(
        [(f * k).sum(-1, keepdim=True), (f @ queue.T).masked_fill(chosen[:, None] == labels, -torch.inf)], 1
    )
    q = z.softmax(-1).mean(0)
    loss = 0.7 * F.cross_entropy(z, chosen) + 0.5 * (q * q.log()).sum()
    loss = loss + 1.3 * F.cross_entropy(contrast / 0.07, torch.zeros(6, dtype=torch.long))
    names = [n for n, _ in plain.named_parameters() if n.endswith((".weight", ".bias"))]
    chosen_parameters = [plain.get_parameter(n) for n in names]
    optimizer = torch.optim.SGD(chosen_parameters, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    loss.backward()
    optimizer.step()
    assert_exact(model.record.loss, loss)
    for n in names:
        assert_exact(model.engine.adapted.named[f"model/{n}"], plain.get_parameter(n), n)
    with torch.no_grad():
        assert_exact(logits, plain(images))  # from after the update


def test_neighbours_vote():
    method = acclimate.adapt(tiny_model(), "adacontrast", queue=4, neighbours=2, refine_after=3, **HOW).method
    method.bank.features[:3, :2] = torch.tensor([[1.0, 0.0], [5.0, 0.5], [0.0, 1.0]])
    method.bank.probabilities[:3, :2] = torch.tensor([[0.2, 0.8], [0.7, 0.3], [1.0, 0.0]])
    sample = torch.zeros(1, method.bank.features.shape[1])
    sample[0, 0] = 1.0
    logits = F.one_hot(torch.tensor([4]), 10).float()
    method.bank.seen.fill_(2)
    assert method.pseudo_labels(logits, sample).tolist() == [4]  # not yet
    method.bank.seen.fill_(3)
    assert method.pseudo_labels(logits, sample).tolist() == [1]  # (0.2 + 0.7) / 2 < (0.8 + 0.3) / 2


@pytest.mark.parametrize(("reference", "newest"), [(False, [5, 2, 3, 4]), (True, [1, 2, 3, 5])])
def test_what_the_bank_replaces(reference, newest):
    method = acclimate.adapt(tiny_model(), "adacontrast", queue=4, reference=reference, **HOW).method
    for i in range(1, 6):
        method.bank.remember(torch.full((1, method.bank.features.shape[1]), float(i)), torch.full((1, 10), 0.1))
    assert method.bank.features[: method.bank.held, 0].tolist() == newest


@pytest.mark.parametrize("sizes", [[1] * 6, [2] * 4, [3] * 4, [3, 3, 1, 2, 2], [3, 4, 4], [2, 1, 3, 1]], ids=str)
def test_the_reference_bank_appends_whole_batches(sizes):
    """Until it has as many samples as the queue or more; then its pointer goes round in all of them."""
    method = acclimate.adapt(tiny_model(), "adacontrast", queue=4, reference=True, **HOW).method
    expected, pointer, number = [], 0, 0.0
    for size in sizes:
        batch = [number + i for i in range(size)]
        number += size
        if len(expected) < 4:
            expected += batch
        else:
            for i, value in enumerate(batch):
                expected[(pointer + i) % len(expected)] = value
        pointer = (pointer + size) % len(expected)
        rows = torch.tensor(batch)[:, None].expand(-1, method.bank.features.shape[1])
        method.bank.remember(rows, torch.full((size, 10), 0.1))
        assert method.bank.features[: method.bank.held, 0].tolist() == expected
    assert int(method.bank.seen) == sum(sizes)


def test_ring():
    assert ring(0, 3, 4).tolist() == [0, 1, 2] and ring(3, 3, 4).tolist() == [3, 0, 1]
    assert sorted(ring(1, 9, 4).tolist()) == [0, 1, 2, 3] and ring(1, 9, 4)[-1] == (1 + 8) % 4


def test_batches_larger_than_the_queue_and_class_subsets():
    model = acclimate.adapt(tiny_model(), "adacontrast", queue=4, neighbours=9, refine_after=6, classes=[2, 5, 8], **HOW)
    for images in tiny_batches(3):
        assert model(images).shape == (6, 3)


def test_views_belong_to_the_image_not_to_its_batch_mates():
    model = acclimate.adapt(double_model(), "adacontrast", **SMALL, **HOW)
    images = double_batches(1)[0]
    state = model.engine.rng.get_state()
    all_three = model.method.views(images, model.engine)
    model.engine.rng.set_state(state)
    first = model.method.views(images[:1], model.engine)
    for one, other in zip(all_three, first):
        assert one.shape == images.shape
        assert_exact(one[:1], other)
    assert not torch.equal(all_three[1], all_three[2])


@pytest.mark.parametrize("channels", [1, 3])
def test_strong_views_stay_pixels(channels):
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        view = moco_view(torch.rand(channels, 28, 28), rng)
        assert view.shape == (channels, 28, 28) and view.min() >= -1e-5 and view.max() <= 1 + 1e-5


@pytest.mark.parametrize(
    "options",
    [{"queue": 0}, {"nesterov": True, "momentum": 0}, {"neighbours": 1.5}, {"temperature": 0}, {"eta": -1}, {"lr": None}],
)
def test_bad_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "adacontrast", **options, **HOW)
