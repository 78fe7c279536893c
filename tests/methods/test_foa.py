"""FOA: its search on functions with a known minimum, its fitness and shift in closed form, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

import acclimate
from acclimate.core.engine import entropy
from acclimate.errors import ConfigError, InputError, NonFiniteError
from acclimate.methods._cma import CMA
from acclimate.methods._prompts import patch_size
from acclimate.models.families import view_of
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def statistics():
    return made_with(tiny_model())


def made_with(model):
    return acclimate.source_statistics(model, tiny_batches(2, seed=3), kinds=["class_tokens"])


def wrap(statistics, model=None, **options):
    return acclimate.adapt(model or tiny_model(), "foa", source_statistics=statistics, **{"population": 4, **options})


@pytest.mark.parametrize(("dimension", "population", "condition", "most"), [
    (5, 8, 1, 150), (10, 10, 1, 250), (10, 10, 1e6, 700), (3, 2, 1, 1500), (4, 3, 1e4, 900),
])  # fmt: skip
def test_the_search_finds_the_minimum_of_a_turned_ellipsoid(dimension, population, condition, most):
    rng = torch.Generator().manual_seed(1)
    search = CMA(dimension, population, 1.0)
    turned = torch.linalg.qr(torch.randn(dimension, dimension, generator=rng, dtype=torch.float64))[0]
    scale = condition ** torch.linspace(0, 1, dimension, dtype=torch.float64)
    for _ in range(most):
        candidates = search.ask(rng)
        search.tell(candidates, ((candidates - 1.5) @ turned).square() @ scale)
    torch.testing.assert_close(search.mean, torch.full_like(search.mean, 1.5), atol=1e-3, rtol=0)
    assert float(search.sigma * search.root.norm()) < 1e-3 and int(search.generation) == most


def test_one_generation_in_closed_form():
    """Of two candidates the better one is the mean's next place, and the paths point there."""
    search = CMA(2, 2, 0.5)
    search.tell(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([7.0, 3.0]))
    step = torch.tensor([0.0, 4.0], dtype=torch.float64)  # in units of sigma
    assert_exact(search.mean, 0.5 * step)
    rate = (1 + 2) / (2 + 1 + 5)
    assert_exact(search.path_sigma, (rate * (2 - rate)) ** 0.5 * step)
    stretch = 4 * (rate * (2 - rate)) ** 0.5 / (2**0.5 * (1 - 1 / 8 + 1 / 84))
    assert_exact(search.sigma, 0.5 * math.exp(rate / (1 + rate) * (stretch - 1)))
    assert not search.path.any()  # sigma is about to grow
    assert torch.linalg.eigvalsh(search.covariance).min() > 0
    assert_exact(search.root @ search.root, search.covariance)


def test_the_search_decomposes_as_rarely_as_its_slow_change_allows():
    search = CMA(200, 6, 1.0)
    rng = torch.Generator().manual_seed(0)
    decomposed = []
    for _ in range(12):
        candidates = search.ask(rng)
        search.tell(candidates, candidates.square().sum(1))
        decomposed.append(int(search.decomposed))
    period = int(search.gap) + 1
    assert period > 1 and decomposed == [g // period * period for g in range(1, 13)]


def test_a_step_in_the_form_one_would_write_first():
    """Prompts put into the model by hand, one candidate after the other, and the shift from the batch before."""
    batches, plain, view = double_batches(), double_model(), view_of(double_model())
    statistics = made_with(double_model())
    mean, std = statistics.of("class_tokens").values()
    model = wrap(statistics, double_model(), discrepancy=0.7, decay=0.8, guard=None)
    best, average = model.method.best.detach().clone(), None

    def tokens_of(images, prompts):
        x = plain._pos_embed(plain.patch_embed(images))
        x = torch.cat([x[:, :1], prompts.expand(len(x), -1, -1), x[:, 1:]], dim=1)
        rows = []
        for i, block in enumerate(plain.blocks):
            x = block(x)
            after = plain.norm if i == len(plain.blocks) - 1 else plain.blocks[i + 1].norm1
            rows.append(after(x)[:, 0])
        return torch.cat(rows, dim=1)

    with torch.no_grad():
        for images in batches:
            search, rng = model.method.search, torch.Generator()
            rng.set_state(model.engine.rng.get_state())
            candidates = [*search.ask(rng).view(4, 3, -1), best]
            tokens = [tokens_of(images, c) for c in candidates]
            costs = [
                entropy(plain.head(t[:, -32:])).sum()
                + 0.7 * len(images) / 64 * ((t.mean(0) - mean).square().sum() + (t.std(0) - std).square().sum())
                for t in tokens
            ]
            chosen = int(torch.stack(costs).argmin())
            best, features = candidates[chosen], tokens[chosen][:, -32:]
            shift = 0 if average is None else mean[-32:] - average
            assert_exact(model(images), plain.head(features + shift))
            assert_exact(model.record.loss, costs[chosen])
            assert model.record.used == 6
            new = torch.stack([t[:, -32:].mean(0) for t in tokens]).mean(0)
            average = new if average is None else 0.8 * average + 0.2 * new
    assert_exact(model.method.average, average)
    assert_exact(model.method.best, best)
    assert model.engine.passes.forward == 4 * 5 * 6 and model.engine.passes.backward == 0
    with model.frozen():
        features = tokens_of(batches[0], best)[:, -32:]
        assert_exact(model(batches[0]), view.head(features + mean[-32:] - average))


def test_a_far_candidate_is_no_collapse(statistics, batches):
    model = wrap(statistics, sigma=30.0, discrepancy=0.0)
    events = []
    for images in batches * 3:
        model(images)
        events.append(model.record.event)
    assert model.record.drift > 3 and not any(events)
    assert int(model.method.search.generation) == 12


def test_a_subset_of_the_classes(statistics, batches):
    model = wrap(statistics, classes=[7, 2, 4], discrepancy=0.0)
    for images in batches:
        logits = model(images)
        assert logits.shape == (6, 3)
        assert model.record.loss <= 6 * torch.tensor(3.0).log()  # a sum of entropies over these classes


def test_single_images(statistics, batches):
    model = wrap(statistics)
    with pytest.raises(InputError, match="a single image has none: collect"):
        model(batches[0][:1])
    assert int(model.state.batch_size) == 0
    model(batches[0])  # the stream may still begin
    before = model.snapshot()
    with model.frozen():
        expected = model(batches[1][:1])
    assert torch.equal(model(batches[1][:1]), expected) and model.record.event.startswith("skipped: a single image")
    assert torch.equal(model.method.search.covariance, before["method/search.covariance"]) and model.record.used == 0


def test_what_is_not_finite_leaves_the_search_alone(statistics, batches):
    bright = 3e38 * batches[1].sign()
    for guard in (None, "default"):
        model = wrap(statistics, guard=guard)
        model(batches[0])
        before = model.snapshot()
        if guard is None:
            with pytest.raises(NonFiniteError):
                model(bright)
        else:
            model(bright)
            assert model.record.event.startswith("skipped")
        assert all(torch.equal(t, before[n]) for n, t in model.state.capture().items() if n.startswith("method/"))


def test_the_size_of_a_patch_is_found(family):
    assert patch_size(view_of(tiny_model(family))) == 8


def test_impossible_options_are_refused(statistics):
    with pytest.raises(ConfigError, match="foa needs statistics of the source data"):
        acclimate.adapt(tiny_model(), "foa")
    for options in ({"prompts": 0}, {"population": 1}, {"discrepancy": -1}, {"sigma": 0}, {"decay": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            wrap(statistics, **options)
