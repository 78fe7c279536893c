"""Scores against closed forms and against other people's formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acclimate.errors import InputError
from acclimate.evaluation.memory import peak_memory
from acclimate.evaluation.scores import Scores


def scored(logits, labels, domain=None, domains=("a", "b")) -> Scores:
    logits, labels = torch.tensor(logits), torch.tensor(labels)
    scores = Scores(logits.shape[1], domains)
    scores.add(logits, labels, torch.zeros_like(labels) if domain is None else torch.tensor(domain))
    return scores


def random_scores(seed: int, count: int, classes: int, cuts: int) -> tuple[Scores, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, classes, generator=generator) * 3
    labels = torch.randint(classes, (count,), generator=generator)
    domain = torch.randint(2, (count,), generator=generator)
    scores = Scores(classes, ("a", "b"))
    for part in torch.arange(count).tensor_split(cuts):
        if len(part):
            scores.add(logits[part], labels[part], domain[part])
    return scores, logits, labels, domain


@given(st.integers(0, 99), st.integers(1, 60), st.integers(2, 12), st.integers(1, 5))
def test_scores_equal_their_definitions_however_the_stream_is_cut(seed, count, classes, cuts):
    scores, logits, labels, domain = random_scores(seed, count, classes, cuts)
    right = logits.argmax(1) == labels
    rank = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert scores.count == count
    assert scores.top1 == pytest.approx(right.double().mean().item())
    assert scores.top5 == pytest.approx((rank < 5).double().mean().item())
    assert scores.nll == pytest.approx(torch.nn.functional.cross_entropy(logits.double(), labels).item())
    each = {n: right[domain == i].double().mean().item() for i, n in enumerate("ab") if (domain == i).any()}
    assert scores.per_domain == pytest.approx(each)
    assert scores.mean == pytest.approx(sum(each.values()) / len(each))
    halves = [mine[len(mine) // 2 :].double().mean().item() for mine in (right[domain == i] for i in domain.unique())]
    assert scores.second_half == pytest.approx(sum(halves) / len(halves))


def test_calibration_error_by_hand():
    # two images with confidence 0.9 of which one is right, one with 0.6 that is right: (2 |0.9 - 0.5| + |0.6 - 1|) / 3
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    scores = scored(p.log().tolist(), [0, 1, 1])
    assert scores.ece == pytest.approx((2 * 0.4 + 0.4) / 3, abs=1e-6)


def test_calibration_error_of_a_calibrated_model_is_small():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(200_000, 1, generator=generator)
    p = torch.cat([p, 1 - p], dim=1)
    labels = (torch.rand(len(p), generator=generator) > p[:, 0]).long()
    scores = Scores(2, ["a"])
    scores.add(p.log(), labels, torch.zeros_like(labels))
    assert scores.ece < 0.01


def test_running_accuracy_ends_at_the_whole():
    scores, logits, labels, _ = random_scores(0, 57, 4, 3)
    where, accuracy = scores.running(points=10)
    assert where[0] == 1 and where[-1] == 57 and len(where) == 10
    right = (logits.argmax(1) == labels).double().numpy()
    assert accuracy == pytest.approx([right[:n].mean() for n in where])
    assert np.all(np.diff(scores.running(points=1000)[0]) == 1)


def test_what_is_not_finite_counts_as_wrong():
    scores = scored([[math.nan, 0.0], [0.0, math.nan], [2.0, 0.0]], [0, 1, 0])
    assert scores.top1 == scores.top5 == pytest.approx(1 / 3)
    assert math.isinf(scores.nll)
    assert scores.ece > 0.6


def test_bad_labels_are_refused_and_change_nothing():
    scores = scored([[0.0, 1.0]], [1])
    for labels in ([2], [-1]):
        with pytest.raises(InputError, match=rf"label {labels[0]} is outside .* 0 to 1"):
            scores.add(torch.zeros(1, 2), torch.tensor(labels), torch.tensor([0]))
    with pytest.raises(InputError, match="do not fit"):
        scores.add(torch.zeros(2, 2), torch.tensor([1]), torch.tensor([0]))
    assert scores.count == 1
    with pytest.raises(InputError, match="no batch"):
        _ = Scores(2, ["a"]).top1


def test_peak_memory_sees_an_allocation():
    with peak_memory(torch.device("cpu")) as small:
        pass
    with peak_memory(torch.device("cpu")) as large:
        torch.ones(64 * 2**18)  # 64 MiB, gone before the end
    if large.mib is None:
        pytest.skip("this system does not tell a process its peak memory")
    assert small.mib < 32 < 60 < large.mib < 96
    with peak_memory(torch.device("cpu")) as again:
        pieces = [torch.ones(2**14) for _ in range(1024)]  # 64 MiB in pieces, which a process keeps when they are freed
        del pieces
    with peak_memory(torch.device("cpu")) as second:
        pieces = [torch.ones(2**14) for _ in range(1024)]
        del pieces
    assert 56 < again.mib < 96 and 56 < second.mib < 96
