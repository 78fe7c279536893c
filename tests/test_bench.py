"""Runs, the store, sweeps and tables, on a tiny model."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console

import acclimate
from acclimate.bench import sweep as sweeping
from acclimate.bench.run import run
from acclimate.bench.spec import describe, specify
from acclimate.bench.store import Store
from acclimate.bench.sweep import sweep
from acclimate.bench.tables import Grid, markdown, terminal
from acclimate.check import tiny_batches, tiny_vit
from acclimate.data.streams import Stream
from acclimate.engine import entropy
from acclimate.errors import ConfigError, StateError


class Batches:
    """A domain of random pictures for the tiny ViT; labels are what the source model says, so that it is right at first."""

    severity = 5

    def __init__(self, name: str = "fog", count: int = 30) -> None:
        self.name = name
        self._images = torch.cat(tiny_batches(count=-(-count // 8), size=8, seed=len(name)))[:count]
        with torch.no_grad():
            self.labels = tiny_vit().eval()(self._images).argmax(1).numpy()

    def load(self, indices):
        return self._images[torch.from_numpy(indices)]


METHODS = {"source": {}, "tent": {"lr": 0.01}}


def quiet_sweep(model, streams, methods=METHODS, **options):
    return sweep(model, streams, methods, model_name="tiny", data={"name": "random"}, console=Console(quiet=True), **options)


@pytest.fixture(scope="module")
def outcomes():
    streams = [Stream(Batches(name), batch_size=8, seed=seed) for name in ("fog", "snow") for seed in (0, 1)]
    return quiet_sweep(tiny_vit(), streams)


def test_the_source_model_scores_itself_perfectly(outcomes):
    for outcome in outcomes:
        if outcome.spec.method == "source":
            result = outcome.result
            assert result.top1 == result.late == result.mean == 1
            assert (result.samples, result.forward, result.backward, result.used) == (30, 30, 0, 0)
            assert result.curve[-1] == (30, 1.0)


def test_a_run_is_the_adapter_on_the_stream():
    model, stream = tiny_vit(), Stream(Batches(), batch_size=8)
    adapter = acclimate.adapt(model, "tent", lr=0.01)
    result = run(adapter, stream)
    adapter.reset()
    right = [adapter(batch.images).argmax(1) == batch.labels for batch in stream]
    assert result.top1 == torch.cat(right).double().mean().item()
    assert result.forward == result.backward == result.used == 30
    assert result.seconds > 0


def test_passes_are_counted_with_the_second_one_and_without_the_rejected():
    stream = Stream(Batches(), batch_size=30)
    images = next(iter(stream)).images
    adapter = acclimate.adapt(tiny_vit(), "sar", margin=math.inf, micro_batch=1, guard=None)
    adapter(images)
    assert (adapter.engine.passes.forward, adapter.engine.passes.backward) == (60, 60)
    adapter = acclimate.adapt(tiny_vit(), "sar", margin=1.5, micro_batch=1, guard=None)
    adapter(images)
    kept = int((entropy(tiny_vit().eval()(images)) < 1.5).sum())
    assert 0 < kept < 30
    assert adapter.engine.passes.forward == 30 + kept


def test_a_sweep_leaves_the_model_as_it_was():
    model = tiny_vit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quiet_sweep(model, [Stream(Batches(), batch_size=8)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    acclimate.adapt(model, "tent")  # not wrapped any more


def test_finished_runs_are_not_run_again(tmp_path, monkeypatch):
    model, stream, store = tiny_vit(), Stream(Batches(), batch_size=8), Store(tmp_path)
    first = quiet_sweep(model, [stream], store=store)
    calls = []
    monkeypatch.setattr(sweeping, "run", lambda *args: calls.append(args) or run(*args))
    second = quiet_sweep(model, [stream], store=store)
    assert not calls and all(outcome.found for outcome in second)
    assert [o.spec.id for o in second] == [o.spec.id for o in first]
    assert json.dumps([o.result.top1 for o in second]) == json.dumps([o.result.top1 for o in first])
    third = quiet_sweep(model, [stream], {"tent": {"lr": 0.02}}, store=store)
    assert len(calls) == 1 and not third[0].found
    quiet_sweep(model, [stream], store=store, again=True)
    assert len(calls) == 3


def test_an_interrupted_sweep_keeps_what_was_finished_and_restores_the_model(tmp_path, monkeypatch):
    model, stream = tiny_vit(), Stream(Batches(), batch_size=8)
    monkeypatch.setattr(sweeping, "run", lambda adapter, *rest: _interrupt(adapter, *rest))
    with pytest.raises(KeyboardInterrupt):
        quiet_sweep(model, [stream], store=Store(tmp_path))
    assert [path.name for path in tmp_path.glob("*/*")] == ["result.json"]
    monkeypatch.undo()
    assert [o.found for o in quiet_sweep(model, [stream], store=Store(tmp_path))] == [True, False]


def _interrupt(adapter, *rest):
    if adapter.method.name == "tent":
        raise KeyboardInterrupt
    return run(adapter, *rest)


def test_a_result_that_cannot_be_read_is_named(tmp_path):
    store, stream = Store(tmp_path), Stream(Batches(), batch_size=8)
    spec = specify(stream, "source", {}, model=describe(tiny_vit(), "tiny"), data={})
    assert store.find(spec) is None
    quiet = quiet_sweep(tiny_vit(), [stream], {"source": {}})
    path = store.write(spec, quiet[0].result)
    assert store.find(spec).top1 == quiet[0].result.top1
    path.write_text("{")
    with pytest.raises(StateError, match=r"result\.json"):
        store.find(spec)


def test_the_identity_of_a_run_has_all_that_decides_it():
    model = describe(tiny_vit(), "tiny")
    moved = tiny_vit()
    with torch.no_grad():
        moved.head.bias += 1
    other = describe(moved, "tiny")

    def identity(stream=None, method="tent", model=model, **options):
        return specify(stream or Stream(Batches(), batch_size=8), method, options, model=model, data={}).id

    different = [
        identity(),
        identity(lr=0.5),
        identity(method="sar"),
        identity(model=other),
        identity(Stream(Batches(), batch_size=4)),
        identity(Stream(Batches("snow"), batch_size=8)),
        identity(Stream(Batches(), batch_size=8, seed=3)),
        identity(Stream(Batches(), "label-shift", batch_size=8)),
    ]
    assert len(set(different)) == len(different)
    assert identity() == identity(Stream(Batches(), batch_size=8, workers=1))


def test_a_wrong_option_is_found_before_anything_runs(monkeypatch):
    monkeypatch.setattr(sweeping, "run", lambda *args: pytest.fail("ran"))
    with pytest.raises(ConfigError, match="has no option"):
        quiet_sweep(tiny_vit(), [Stream(Batches())], {"source": {}, "tent": {"speed": 1}})


def test_the_tables_have_mean_and_deviation_over_seeds(outcomes):
    grid = Grid(outcomes)
    assert grid.methods == ["source", "tent"] and grid.columns == ["fog", "snow"]
    tent = {(o.spec.domains[0], o.spec.seed): o.result.mean for o in outcomes if o.spec.method == "tent"}
    fog = [tent["fog/5", seed] for seed in (0, 1)]
    assert grid.cell("tent", "fog") == pytest.approx((np.mean(fog), np.std(fog, ddof=1)))
    means = [np.mean([tent[name, seed] for name in ("fog/5", "snow/5")]) for seed in (0, 1)]
    assert grid.cell("tent") == pytest.approx((np.mean(means), np.std(means, ddof=1)))
    console = Console(width=140, file=io.StringIO())
    console.print(terminal(outcomes, "Top-1"))
    text = console.file.getvalue()
    assert "source" in text and "100.0" in text and "2nd half" in text
    lines = markdown(outcomes).splitlines()
    assert lines[0].startswith("| method | fog | snow | mean")
    assert "**100.0 ± 0.0**" in lines[2]
