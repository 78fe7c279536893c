"""The harm on hostile streams is that of the runs, without and with the guard."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from acclimate.data.catalog import Selection
from acclimate.data.hostile import hostile_streams
from acclimate.evaluation.harm import FACTORS, HarmSummary, _needed, _rates, measure_harm, summaries
from acclimate.evaluation.paired import Difference
from acclimate.evaluation.store import Store
from acclimate.evaluation.testbed import open_testbed
from acclimate.report.harm import harm_markdown, harm_overview


@pytest.fixture(scope="module")
def testbed():
    return open_testbed(selection=Selection(["fog"], [5], images=64))


@pytest.fixture(scope="module")
def cells(testbed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("harm")
    quiet = Console(file=io.StringIO())
    return measure_harm(testbed, ["neo", "tent"], rates=["own", "100x"], batch_size=32, store=Store(folder), console=quiet)


def test_every_method_meets_every_stream_at_every_rate_that_it_has(cells):
    found = {(cell.method, cell.rate) for cell in cells}
    assert found == {("neo", "own"), ("tent", "own"), ("tent", "100x")}  # neo makes no steps
    streams = {cell.stream for cell in cells}
    assert len(streams) == 7 and len(cells) == 3 * len(streams)


def test_the_unadapted_model_is_the_same_in_every_row(cells):
    for stream in {cell.stream for cell in cells}:
        assert len({cell.source for cell in cells if cell.stream == stream}) == 1


def test_a_run_without_an_alarm_is_not_changed_by_the_guard(cells):
    calm = [cell for cell in cells if not cell.alarms]
    assert calm and all(cell.guarded.points == cell.unguarded.points for cell in calm)


def test_the_second_half_is_that_of_the_images_that_show_something(cells):
    junk = next(c for c in cells if (c.method, c.rate, c.stream) == ("tent", "100x", "noise first"))
    mixed = next(c for c in cells if (c.method, c.rate, c.stream) == ("tent", "own", "shuffled fog/5"))
    assert junk.late.interval > junk.guarded.interval  # of half as many images
    assert mixed.late.points == mixed.guarded.points == 0.0


def test_a_hundredfold_rate_does_harm_and_the_guard_undoes_most_of_it(cells):
    without, guarded = summaries(cells)["tent", "100x"]
    assert without.worst < -5
    assert guarded.mean_harm > without.mean_harm


def test_rates_are_multiples_of_the_methods_own(testbed):
    for method, names in (("tent", ["lr"]), ("dct", ["lr", "lr_generator"]), ("keel", ["rho"])):
        found = _rates(testbed, method, ["own", "10x", "100x"], 64, {})
        assert found["own"] == {}
        assert list(found["10x"]) == names
        assert all(found["100x"][name] == pytest.approx(10 * found["10x"][name]) for name in names)
    assert _rates(testbed, "tent", ["10x"], 64, {}) == {"10x": {"lr": pytest.approx(0.001 * FACTORS["10x"])}}
    assert _rates(testbed, "tent", ["10x"], 1, {})["10x"]["lr"] == pytest.approx(0.001 * FACTORS["10x"] / 64)
    assert _rates(testbed, "tent", ["tuned"], 64, {"x": 1})["tuned"] == {"x": 1, **testbed.options("tent", 64)}


def test_a_method_that_compares_samples_collects_single_images_or_is_left_out(testbed):
    streams = {stream.setting: stream for stream in hostile_streams(testbed.data.domains)}
    single, usual = streams["single images"], streams["sorted by class"]
    assert _needed(testbed, "roid", single) == {"window": 16} and _needed(testbed, "roid", usual) == {}
    assert _needed(testbed, "actmad", single) is None and _needed(testbed, "tent", single) == {}


def test_a_summary_counts_losses_beyond_chance():
    found = HarmSummary.of([Difference(-3.0, 1.0), Difference(-3.0, 4.0), Difference(-0.5, 0.1), Difference(2.0, 1.0)])
    assert (found.worst, found.losses) == (-3.0, 1)
    assert found.mean_harm == pytest.approx(-6.5 / 4) and found.gain == pytest.approx(0.5)


def test_tables_name_every_method_and_stream(cells):
    text = harm_markdown(cells)
    assert all(cell.stream in text and f"| {cell.method} |" in text for cell in cells)
    console = Console(file=io.StringIO(), width=150)
    console.print(harm_overview(cells))
    assert "Harm on 7 hostile streams" in console.file.getvalue() and "100x" in console.file.getvalue()
