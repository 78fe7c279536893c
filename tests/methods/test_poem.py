"""POEM: the distribution of the source entropies, the bets, and a whole run against the form one would write first."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import acclimate
from acclimate.core.engine import entropy
from acclimate.core.statistics import SourceStatistics, source_statistics
from acclimate.errors import ConfigError
from acclimate.methods.poem import POEM
from acclimate.models.families import view_of
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
IMAGES = torch.cat(tiny_batches(2, size=20, seed=3))
T = 1.025


@pytest.fixture(scope="module")
def statistics():
    return source_statistics(double_model(), IMAGES, kinds=["logits"])


def wrapped(statistics, **options):
    return acclimate.adapt(double_model(), "poem", source_statistics=statistics, **{"lr": 0.02, "delay": 7, **options})


def knowing(entropies, **options):
    """POEM with these entropies of source images, without a model."""
    method = POEM(**options)
    method.source_entropies = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(entropies), requires_grad=False)])
    return method


def test_the_statistics_are_the_logits_of_all_images(statistics):
    with torch.no_grad():
        expected = double_model()(IMAGES.double())
    assert_exact(statistics.of("logits")["logits"], expected.float())
    model = wrapped(statistics, classes=[1, 4, 9])
    assert_exact(model.method.source_entropies[0], entropy(expected[:, [1, 4, 9]].float() / T))


def test_the_distribution_has_a_point_for_each_distinct_entropy():
    """Entropies 1, 1, 2, 4: F(1) = 1/2, F(2) = 3/4, F(4) = 1. Lines between, constants outside. The bet is still 0."""
    method = knowing([4.0, 1.0, 2.0, 1.0])
    for h, u in [(0.0, 0.5), (1.0, 0.5), (1.5, 0.625), (2.0, 0.75), (3.0, 0.875), (4.0, 1.0), (9.0, 1.0)]:
        method.seen.zero_(), method.bet.zero_(), method.squares.zero_(), method.log_wealth.zero_()
        target = float(method.targets(torch.tensor([h], dtype=torch.float64)))
        assert target == pytest.approx(min(max(h, 1.0), 4.0))
        # what was bet on is told by the first gradient that counts
        method.targets(torch.tensor([h], dtype=torch.float64))
        assert float(method.squares) == pytest.approx((u - 0.5) ** 2)


def test_a_single_distinct_entropy_is_every_target():
    method = knowing([1.5, 1.5, 1.5])
    assert method.targets(torch.tensor([0.1, 1.5, 2.0, 2.2])).tolist() == [1.5] * 4


def test_bets_by_hand():
    """u = 1 for three samples: the first one only begins, then g = 1/2 and 1/2 / (1 + e/2)."""
    method = POEM(gamma=0.4, bet_limit=1.5)
    assert method.bend([1.0]) == [1.0] and float(method.bet) == 0 and float(method.squares) == 0
    assert method.bend([1.0]) == [1.0] and float(method.bet) == pytest.approx(0.4)
    assert method.bend([0.25]) == pytest.approx([0.25 + 0.2 * (0.0625 - 0.25)])
    wealth = 1 + 0.4 * (0.25 - 0.5)
    assert float(method.log_wealth) == pytest.approx(math.log(wealth))
    slope = -0.25 / wealth
    assert float(method.squares) == pytest.approx(0.25 + slope**2)
    assert float(method.bet) == pytest.approx(0.4 + 0.4 * slope / math.sqrt(0.25 + slope**2))
    assert int(method.seen) == 3


def test_a_batch_is_bet_on_one_by_one():
    generator = np.random.default_rng(0)
    places = generator.uniform(size=300).tolist()
    whole, single = POEM(gamma=0.3), POEM(gamma=0.3)
    bent = whole.bend(places)
    assert bent == [single.bend([u])[0] for u in places]
    assert whole.state_dict() == single.state_dict()
    assert all(0 <= b <= 1 for b in bent)


def test_the_bet_exceeds_its_limit_by_one_step_at_most_and_the_wealth_is_bounded():
    method, bets = POEM(gamma=0.3, bet_limit=1.0), []
    for u in [1.0] * 40:
        method.bend([u])
        bets.append(float(method.bet))
    assert bets[-1] == max(bets) and 1.0 < bets[-1] <= 1.3
    squares = float(method.squares)
    method.bend([1.0])
    assert float(method.squares) == squares  # outward: no gradient
    method.bend([0.1])
    assert float(method.bet) < bets[-1]  # inward
    method.bend([1.0] * 5000)
    assert float(method.log_wealth) == pytest.approx(200 * math.log(10))


def test_a_bet_that_could_lose_all_stays_finite():
    method = POEM(gamma=2.0, bet_limit=2.0)
    bent = method.bend([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    assert all(math.isfinite(value) for value in (*bent, *(float(b) for b in method.buffers())))


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("reweighted", [False, True])
def test_a_run_is_the_one_of_the_paper(statistics, reweighted, reference):
    margin = 1.3
    plain = double_model()
    view = view_of(plain)
    norms = [p for block in view.blocks[: 4 if reference else 3] for norm in block.norms for p in norm.parameters()]
    norms += [*plain.norm.parameters()] if reference else []
    optimizer = torch.optim.SGD(norms, lr=0.02, momentum=0.9)
    model = wrapped(statistics, margin=margin, reweighted=reweighted, reference=reference, gamma=0.3, bet_limit=0.5)
    source = model.method.source_entropies[0].double().numpy()
    quantiles, counts = np.unique(source, return_counts=True)
    shares = counts.cumsum() / len(source)
    twin, seen = POEM(gamma=0.3, bet_limit=0.5), 0
    for images in double_batches(5):
        logits = plain(images) / T
        h = entropy(logits)
        target = torch.tensor(np.interp(twin.bend(np.interp(h.detach(), quantiles, shares).tolist()), shares, quantiles))
        seen += len(images)
        kept = (h < margin) if reweighted else torch.ones(len(h), dtype=torch.bool)
        weight = (margin - h).exp().detach() if reweighted else 1.0
        if seen >= 7:
            loss = ((weight * h - weight * target)[kept] ** 2).mean() / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert_exact(model(images), logits)
        assert model.record.used == (int(kept.sum()) if seen >= 7 else 0)
        assert_exact(model.method.bet, twin.bet)
    assert {n.removeprefix("model/") for n in model.engine.adapted.named} == {
        n for n, p in plain.named_parameters() if any(p is q for q in norms)
    }
    by_name = dict(plain.named_parameters())
    for name, p in model.engine.adapted.named.items():
        assert_exact(p, by_name[name.removeprefix("model/")], name)


@pytest.mark.parametrize("reference", [False, True])
def test_a_model_without_a_norm_after_the_last_block_adapts(reference):
    """A ResNet, or a ViT whose last norm was removed."""
    plain = tiny_model()
    plain.norm = torch.nn.Identity()
    for model in (tiny_model("resnet"), plain):
        statistics = source_statistics(model, IMAGES, kinds=["logits"])
        adapter = acclimate.adapt(model, "poem", source_statistics=statistics, delay=0, reference=reference)
        assert adapter(IMAGES[:6]).isfinite().all() and adapter.record.drift > 0


def test_nothing_is_learned_before_the_delay_but_the_bet(statistics):
    model = wrapped(statistics, delay=13)
    for count, images in enumerate(double_batches(3), start=1):
        model(images)
        assert (model.record.drift > 0) == (count == 3) and int(model.method.seen) == 6 * count
    assert float(model.method.bet) != 0
    model.reset()
    assert int(model.method.seen) == 0 and float(model.method.bet) == float(model.method.log_wealth) == 0


@pytest.mark.parametrize("reference", [False, True])
def test_a_batch_without_a_reliable_sample(statistics, reference):
    model = wrapped(statistics, reference=reference, margin=2.3, delay=0)
    first, second = double_batches(2)
    model(first)
    assert model.record.used
    before = [p.detach().clone() for p in model.engine.adapted.tensors]
    buffers = [model.engine.adapted.optimizer.state[p]["momentum_buffer"].clone() for p in model.engine.adapted.tensors]
    model.method.margin, bet = 0.0, float(model.method.bet)
    model(second)
    assert model.record.used == 0 and model.record.loss is None and float(model.method.bet) != bet
    for p, value, buffer in zip(model.engine.adapted.tensors, before, buffers):
        assert_exact(p, value - 0.02 * 0.9 * buffer if reference else value)


def test_the_temperature_divides_frozen_predictions_too(statistics):
    model, images = wrapped(statistics, temperature=2.0), double_batches(1)[0]
    with model.frozen(), torch.no_grad():
        assert_exact(model(images), double_model()(images) / 2)


def test_a_state_file_suffices_to_continue(statistics, tmp_path):
    model = wrapped(statistics)
    for images in double_batches(2):
        model(images)
    model.save(tmp_path / "s.safetensors")
    again = acclimate.load(tmp_path / "s.safetensors", double_model())
    assert torch.equal(again.method.source_entropies[0], model.method.source_entropies[0])
    images = double_batches(1, seed=5)[0]
    assert torch.equal(again(images), model(images))
    statistics.save(tmp_path / "l.safetensors")
    assert SourceStatistics.load(tmp_path / "l.safetensors").of("logits")["logits"].shape == (40, 10)


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"gamma": -1}, {"bet_limit": 2.5}, {"delay": 1.5}, {"margin": -1}, {"lr": -1}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "poem", **options)
