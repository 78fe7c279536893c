"""Runs, the store, grids and tables, on a tiny model."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

import acclimate
from acclimate.core.engine import entropy
from acclimate.core.guard import NEW_PERIOD, _drawn
from acclimate.data import bundled
from acclimate.data.corruptions import CORRUPTIONS
from acclimate.data.domains import Corrupted, Domain, DomainKey, Images
from acclimate.data.streams import Stream
from acclimate.errors import ConfigError, StateError
from acclimate.evaluation import jobs as work
from acclimate.evaluation.formats import markdown, terminal, write_table
from acclimate.evaluation.grid import run_grid
from acclimate.evaluation.progress import ProgressView
from acclimate.evaluation.results import Results
from acclimate.evaluation.run import Result, run
from acclimate.evaluation.scores import Scores
from acclimate.evaluation.spec import describe, specify
from acclimate.evaluation.store import Store
from acclimate.evaluation.tables import Grid, Summary
from acclimate.evaluation.testbed import open_testbed
from acclimate.report.terminal import show
from acclimate.testing.check import tiny_batches, tiny_model


class Batches(Domain):
    """A domain of random images for the tiny ViT; labels are what the source model says, so that it is right at first."""

    def __init__(self, name: str = "fog", count: int = 30) -> None:
        self.key = DomainKey(name, 5)
        self._identity = f"{name}, {count} images"
        self._images = torch.cat(tiny_batches(count=-(-count // 8), size=8, seed=len(name)))[:count]
        with torch.no_grad():
            self.labels = tiny_model().eval()(self._images).argmax(1).numpy()

    @property
    def identity(self):
        return self._identity

    def load(self, indices):
        return self._images[torch.from_numpy(indices)]


METHODS = {"source": {}, "tent": {"lr": 0.01}}


def quiet_grid(model, streams, methods=METHODS, **options):
    testbed = open_testbed(model, streams[0].domains, model_name="tiny", device="cpu")
    return run_grid(testbed, streams, methods, console=Console(quiet=True), **options)


@pytest.fixture(scope="module")
def outcomes():
    streams = [Stream(Batches(name), batch_size=8, seed=seed) for name in ("fog", "snow") for seed in (0, 1)]
    return quiet_grid(tiny_model(), streams)


def test_the_source_model_scores_itself_perfectly(outcomes):
    for outcome in outcomes:
        if outcome.spec.method == "source":
            result = outcome.result
            assert result.top1 == result.second_half == result.mean == 1
            assert (result.samples, result.forward, result.backward, result.used) == (30, 30, 0, 0)
            assert result.curve[-1] == (30, 1.0)


def test_a_run_is_the_adapter_on_the_stream():
    domain = Batches()
    domain.labels[::5] = np.arange(6)  # so that it is wrong at times
    stream = Stream(domain, batch_size=8)
    adapter = acclimate.adapt(tiny_model(), "tent", lr=0.01)
    result = run(adapter, stream)
    adapter.reset()
    right = [adapter(batch.images).argmax(1) == batch.labels for batch in stream]
    assert result.top1 == torch.cat(right).double().mean().item()
    assert result.backward == result.used == 30
    assert result.forward == 30 + len(_drawn(0, 30, NEW_PERIOD))  # the guard compares some images of a new run
    assert result.seconds > 0
    adapter.reset()
    again = run(adapter, stream)
    assert replace(again, seconds=0, peak_mib=0) == replace(result, seconds=0, peak_mib=0)
    scores = Scores(10, [DomainKey("fog", 5)])
    adapter.reset()
    for batch in stream:
        scores.add(adapter(batch.images), batch.labels, batch.domain)
    for name in ("top1", "top5", "second_half", "mean", "per_domain", "ece", "nll"):
        assert getattr(result, name) == getattr(scores, name), name
    assert len({result.top1, result.top5, result.second_half, result.ece, result.nll}) == 5, "else two could be exchanged"


def test_passes_are_counted_with_the_second_one_and_without_the_rejected():
    stream = Stream(Batches(), batch_size=30)
    images = next(iter(stream)).images
    adapter = acclimate.adapt(tiny_model(), "sar", margin=math.inf, micro_batch=1, guard=None)
    adapter(images)
    assert (adapter.engine.passes.forward, adapter.engine.passes.backward) == (60, 60)
    adapter = acclimate.adapt(tiny_model(), "sar", margin=1.5, micro_batch=1, guard=None)
    adapter(images)
    kept = int((entropy(tiny_model().eval()(images)) < 1.5).sum())
    assert 0 < kept < 30
    assert adapter.engine.passes.forward == 30 + kept


def test_a_sweep_leaves_the_model_as_it_was():
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quiet_grid(model, [Stream(Batches(), batch_size=8)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    acclimate.adapt(model, "tent")  # not wrapped any more


def test_finished_runs_are_not_run_again(tmp_path, monkeypatch):
    model, stream, store = tiny_model(), Stream(Batches(), batch_size=8), Store(tmp_path)
    first = quiet_grid(model, [stream], store=store)
    calls = []
    monkeypatch.setattr(work, "run", lambda *args, **options: calls.append(args) or run(*args, **options))
    second = quiet_grid(model, [stream], store=store)
    assert not calls and all(outcome.found for outcome in second)
    assert [o.spec.id for o in second] == [o.spec.id for o in first]
    assert [o.result for o in second] == [o.result for o in first]
    third = quiet_grid(model, [stream], {"tent": {"lr": 0.02}}, store=store)
    assert len(calls) == 1 and not third[0].found
    quiet_grid(model, [stream], store=store, fresh=True)
    assert len(calls) == 3


def test_an_interrupted_sweep_keeps_what_was_finished_and_restores_the_model(tmp_path, monkeypatch):
    model, stream = tiny_model(), Stream(Batches(), batch_size=8)
    monkeypatch.setattr(work, "run", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        quiet_grid(model, [stream], store=Store(tmp_path))
    assert [path.name for path in tmp_path.glob("*/*.json") if path.name != "spec.json"] == ["result.json"]
    monkeypatch.undo()
    assert [o.found for o in quiet_grid(model, [stream], store=Store(tmp_path))] == [True, False]


def _interrupt(adapter, *rest, **options):
    if adapter.method.name == "tent":
        raise KeyboardInterrupt
    return run(adapter, *rest, **options)


def test_a_result_comes_back_from_its_file(outcomes):
    hopeless = replace(outcomes[0].result, nll=math.inf, events=[(3, "recovered")])
    for result in (outcomes[0].result, hopeless):
        assert Result.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result


def test_the_identity_of_a_run_has_all_that_decides_it():
    model = describe(tiny_model(), "tiny")
    moved = tiny_model()
    with torch.no_grad():
        moved.head.bias += 1
    other = describe(moved, "tiny")
    images = Images(*(array[:12] for array in bundled.images()))
    half = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    corrupted = [
        Corrupted(images, "fog", 5, **half),
        Corrupted(images, "fog", 5, **half, seed=1),
        Corrupted(images, "fog", 5, mean=(0.4,) * 3, std=(0.5,) * 3),
        Corrupted(Images(*(array[12:24] for array in bundled.images())), "fog", 5, **half),
        Corrupted(images._replace(labels=images.labels[::-1]), "fog", 5, **half),
    ]

    def identity(stream=None, method="tent", model=model, **options):
        return specify(stream or Stream(Batches(), batch_size=8), method, options, model=model).id

    different = [
        identity(),
        identity(lr=0.5),
        identity(method="sar"),
        identity(model=other),
        identity(Stream(Batches(), batch_size=4)),
        identity(Stream(Batches("snow"), batch_size=8)),
        identity(Stream(Batches(), batch_size=8, seed=3)),
        identity(Stream(Batches(), "label-shift", batch_size=8)),
        identity(Stream(Batches(count=29), batch_size=8)),
        *(identity(Stream(domain, batch_size=8)) for domain in corrupted),
    ]
    assert len(set(different)) == len(different)
    assert identity() == identity(Stream(Batches(), batch_size=8, workers=1))


def test_a_wrong_option_is_found_before_anything_runs(monkeypatch):
    monkeypatch.setattr(work, "run", lambda *args, **options: pytest.fail("ran"))
    with pytest.raises(ConfigError, match="has no option"):
        quiet_grid(tiny_model(), [Stream(Batches())], {"source": {}, "tent": {"speed": 1}})


FOG, SNOW = DomainKey("fog", 5), DomainKey("snow", 5)


def test_the_tables_have_mean_and_deviation_over_seeds(outcomes):
    grid = Grid(outcomes)
    _, tent = grid.rows
    assert [row.method for row in grid.rows] == ["source", "tent"] and grid.columns == [FOG, SNOW, *Summary]
    found = {(o.spec.domains[0], o.spec.seed): 100 * o.result.mean for o in outcomes if o.spec.method == "tent"}
    fog = [found[FOG, seed] for seed in (0, 1)]
    assert [grid.cell(tent, FOG).accuracy, grid.cell(tent, FOG).deviation] == pytest.approx(
        [np.mean(fog), np.std(fog, ddof=1)]
    )
    means = [np.mean([found[key, seed] for key in (FOG, SNOW)]) for seed in (0, 1)]
    cell = grid.cell(tent, Summary.MEAN)
    assert [cell.accuracy, cell.deviation, cell.seeds] == pytest.approx([np.mean(means), np.std(means, ddof=1), 2])
    assert grid.gain(tent, Summary.MEAN).points == pytest.approx(np.mean(means) - 100)
    lines = markdown(grid).splitlines()
    assert lines[0].startswith("| method | fog | snow | mean | second half |")
    assert "| source |" in lines[2] and "100.0±0.0" in lines[2]
    assert f"{np.mean(means):.1f}±{np.std(means, ddof=1):.1f}" in lines[3]


def printed(outcomes, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(terminal(Grid(outcomes), "Top-1", width=width))
    return console.file.getvalue()


def test_a_table_of_many_domains_still_fits_a_terminal(outcomes):
    assert "100.0±0.0" in printed(outcomes, 100)
    pairs = [
        replace(
            o,
            spec=replace(o.spec, domains=[DomainKey(name, 5)]),
            result=replace(o.result, per_domain={DomainKey(name, 5): 1.0}, by_image={}),
        )
        for name in CORRUPTIONS
        for o in outcomes[:4]
        if o.spec.domains == [FOG]
    ]
    text = printed(pairs, 80)
    assert "…" not in text
    assert all(name in text for name in (*CORRUPTIONS, "mean", "ms/image", "100.0±0.0"))


def test_several_domains_in_one_stream_have_a_column_each():
    stream = Stream([Batches("fog"), Batches("snow")], "continual", batch_size=8)
    outcomes = quiet_grid(tiny_model(), [stream])
    grid = Grid(outcomes)
    assert grid.columns == [FOG, SNOW, *Summary]
    tent = outcomes[1].result
    assert grid.cell(grid.rows[1], SNOW).accuracy == pytest.approx(100 * tent.per_domain[SNOW])


def test_results_that_do_not_belong_together_are_refused(outcomes):
    other = replace(outcomes[0], spec=replace(outcomes[0].spec, batch_size=4))
    with pytest.raises(ConfigError, match="batches of 4"):
        Grid([*outcomes, other])
    other = replace(outcomes[1], spec=replace(outcomes[1].spec, order="another"))
    with pytest.raises(ConfigError, match="2 results are of tent on fog/5 with seed 0"):
        Grid([*outcomes, other])
    with pytest.raises(ConfigError, match="no result"):
        Grid([])
    missing = Grid([o for o in outcomes if o.spec.method == "source" or o.spec.domains == [FOG]])
    assert missing.text(missing.rows[1], SNOW) == "-"


def test_a_folder_that_cannot_be_written_is_found_before_anything_runs(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(work, "run", lambda *args, **options: pytest.fail("ran"))
    with pytest.raises(StateError, match="file"):
        quiet_grid(tiny_model(), [Stream(Batches())], store=Store(tmp_path / "file"))


HOSTILE = [
    "[link=javascript:alert(1)]x[/link]",
    "[/]",
    "a|b",
    "<script>alert(1)</script>",
    r"\input{x}^~",
    "two\nlines",
    ":fire:",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_text_in_every_format(outcomes, name):
    def renamed(o):
        spec = replace(o.spec, method=name, setting=name, dataset=name, model={**o.spec.model, "name": name})
        return replace(o, spec=replace(spec, versions={name: name}), result=replace(o.result, events=[(1, name)]))

    others = [replace(o, spec=replace(o.spec, **vars(renamed(o).spec) | {"method": "source"})) for o in outcomes[::2]]
    results = Results([*others, *map(renamed, outcomes[1::2])])
    console = Console(width=200, file=io.StringIO(), force_terminal=True)
    show(results, console)
    with ProgressView([], {}, Store("nowhere"), console) as view:
        view._progress.update(view._overall, description=name)
        view._progress.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    assert "\x1b]8" not in console.file.getvalue(), "no link"
    assert all(line in shown for line in name.split("\n")) and f"first at step 1: {name}" in shown
    html = results._repr_html_()
    assert "<a " not in html and "<script" not in html
    (grid,) = results.grids().values()
    table = markdown(grid).splitlines()
    assert len(table) == 4 and all(len(re.findall(r"(?<!\\)\|", line)) == 6 + 1 for line in table) and "<" not in table[3]
    written = write_table("latex", grid, name)
    body, _, comment = written.rpartition("\n")
    assert comment.startswith("% ") and r"\input" not in body.replace(r"\textbackslash{}input", "")
    assert all(body.count(line) == 1 for line in (r"\toprule", r"\bottomrule")) and body.count(r" \\") >= 3
