"""Figures are found by themselves, saved with what they are of, and read in the order of a report."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
from subjects import tiny_subject

from acclimate.analysis import registry
from acclimate.analysis.figures import Figure, SavedFigure, drawing, new
from acclimate.analysis.registry import figure_kinds, figure_order, saved_figures
from acclimate.errors import StateError
from acclimate.evaluation.spec import describe


def drawn(name: str = "rollout", **more: object) -> Figure:
    with drawing():
        canvas = new(2, 2)
        canvas.subplots().plot([0, 1])
    return Figure(name, "A line", "A line.", [{"x": 0.5}], canvas, ["It is straight."], {"seed": "0"}, **more)


def test_every_figure_declares_itself():
    names = [kind.name for kind in figure_kinds()]
    assert names == ["attention-distance", "rollout", "tsne", "sensitivity", "ablation", "cost", "stream"]
    assert figure_order() == [
        "attention-distance", "rollout", "class-tokens", "separability", "conditioners", "sensitivity", "ablation", "cost",
        "stream",
    ]  # fmt: skip
    for kind in figure_kinds():
        keywords = kind.draw.__kwdefaults__
        assert {argument.name: argument.default for argument in kind.arguments}.items() <= keywords.items()


def test_a_new_figure_is_one_file(monkeypatch, tmp_path):
    module = ModuleType("acclimate.analysis.mine")
    module.FIGURE = replace(figure_kinds()[0], name="mine", position=15, draws=("mine",))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    real = registry.pkgutil.iter_modules
    found = type("Found", (), {"name": "mine"})
    monkeypatch.setattr(registry.pkgutil, "iter_modules", lambda path: [*real(path), found])
    figure_kinds.cache_clear()
    try:
        assert [kind.name for kind in figure_kinds()][:3] == ["attention-distance", "mine", "rollout"]
        assert figure_order()[1] == "mine"
    finally:
        figure_kinds.cache_clear()


def test_a_saved_figure_knows_its_model(tmp_path):
    subject = tiny_subject()
    path = drawn(origin=subject.origin).save(tmp_path)[3]
    saved = SavedFigure.read(path)
    assert (saved.name, saved.title, saved.findings, saved.protocol) == (
        "rollout",
        "A line",
        ["It is straight."],
        {"seed": "0"},
    )
    assert saved.origin == subject.origin and saved.origin["data"] == "tiny" and "<svg" in saved.svg
    model = describe(subject.model, "any name")
    assert saved.shows(model) and not saved.shows({**model, "weights": "0" * 16})


def test_figures_are_read_in_the_order_of_a_report(tmp_path):
    for name in ("cost", "another", "conditioners", "rollout"):
        drawn(name).save(tmp_path)
    assert [figure.name for figure in saved_figures(tmp_path)] == ["rollout", "conditioners", "cost", "another"]


def test_a_figure_of_an_older_version_is_to_be_made_again(tmp_path):
    path = drawn().save(tmp_path)[3]
    words = json.loads(path.read_text())
    del words["origin"]
    path.write_text(json.dumps(words))
    with pytest.raises(StateError, match="make it again"):
        SavedFigure.read(path)
