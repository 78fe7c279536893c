"""The cost of a step: its numbers, and that it is drawn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from subjects import tiny_subject

from acclimate.analysis import cost as figure_of_cost
from acclimate.evaluation.cost import Cost
from acclimate.testing.check import tiny_batches, tiny_model


@pytest.fixture
def few_methods(monkeypatch):
    monkeypatch.setattr(figure_of_cost, "list_methods", lambda: ["source", "tent", "sar", "dct", "eata"])


@pytest.mark.usefixtures("few_methods")
def test_methods_that_cannot_run_are_listed_with_the_reason():
    (figure,) = figure_of_cost.draw(tiny_subject(24), rounds=1)
    rows = {row["method"]: row for row in figure.rows}
    assert "statistics" in rows["eata"]["not_run"] and rows["eata"]["ratio"] is None
    assert rows["dda"]["not_run"] and rows["dda"]["paper_minutes"] == 7200
    assert (rows["tent"]["forward"], rows["tent"]["backward"], rows["tent"]["not_run"]) == (1, 1, "")
    assert "eata" in figure.caption and "in the paper 1.14 times" in " ".join(figure.findings)


@pytest.mark.usefixtures("few_methods")
def test_the_severity_decides_what_is_measured(monkeypatch):
    subject, seen = tiny_subject(24), []
    monkeypatch.setattr(
        figure_of_cost,
        "measure",
        lambda model, method, batches, **more: seen.append(batches[0]) or Cost(1, 1, 1, 1, 1, 1, 1, None),
    )
    (figure,) = figure_of_cost.draw(subject, severity=4, rounds=1)
    assert figure.protocol["corruption"] == "gaussian_noise, severity 4, batches of 24"
    assert torch.equal(seen[0], subject.batch("gaussian_noise", 4))
    assert not torch.equal(seen[0], subject.batch("gaussian_noise"))


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

    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=now))
    found = cost.measure(model, "sar", tiny_batches(count=4), options={"margin": 10.0}, guard=None)
    assert (found.ratio, found.least, found.most, found.seconds, found.rounds) == (4, 2, 8, 6, 3)
    assert (found.forward, found.backward) == (2, 2)
    assert isinstance(found, Cost)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
