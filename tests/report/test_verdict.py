"""The sentence below a table says what the numbers say, whatever they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import acclimate
from acclimate.core.console import PlainConsole
from acclimate.data.domains import DomainKey
from acclimate.evaluation.paired import pack_counts
from acclimate.evaluation.results import Results
from acclimate.evaluation.tables import Grid, Summary
from acclimate.report.terminal import show
from acclimate.report.verdict import verdict

IMAGES = 200
CLEAN, FOG, SNOW = DomainKey("clean"), DomainKey("fog", 5), DomainKey("snow", 5)


@pytest.fixture(scope="module")
def template():
    return acclimate.bench(methods=["source"], corruptions=["fog"], images=8, out=None)[0]


@pytest.fixture
def results(template):
    """Return a function that makes results, given the number of correct predictions by method and domain.

    The images that a method predicts correctly are the first ones, so that methods differ in as few as they can.
    """

    def made(continual=False, **rows):
        return Results(
            outcome(template, method, group)
            for method, counts in rows.items()
            for group in ([counts] if continual else [{key: count} for key, count in counts.items()])
        )

    return made


def outcome(template, method, counts):
    right = {key: (np.arange(IMAGES) < count).astype(float) for key, count in counts.items()}
    keys = list(counts)
    spec = replace(template.spec, method=method, domains=keys, data=[str(key) for key in keys], images=[IMAGES] * len(keys))
    result = replace(
        template.result,
        per_domain={key: each.mean() for key, each in right.items()},
        mean=float(np.mean([each.mean() for each in right.values()])),
        second_half=float(np.mean([each[IMAGES // 2 :].mean() for each in right.values()])),
        by_image={key: pack_counts(each, np.arange(IMAGES), IMAGES) for key, each in right.items()},
    )
    return replace(template, spec=spec, result=result)


def said(results):
    return verdict(Grid(results))


def test_a_gain_beyond_chance(results):
    sentence = said(results(source={FOG: 100, SNOW: 100, CLEAN: 180}, keel={FOG: 140, SNOW: 120, CLEAN: 181}))
    assert sentence.startswith("In the mean of 2 shifts, keel gains 15.0 ± ")
    assert " points over the unadapted model; on clean images, keel (+0.5 ± 1.4) does not differ from it beyond chance." in (
        sentence
    )


def test_a_difference_within_chance_is_neither_gain_nor_loss(results):
    for count in (98, 100, 102):
        sentence = said(results(source={FOG: 100}, tent={FOG: count}))
        assert "does not differ from the unadapted model beyond chance." in sentence
        assert "gain" not in sentence and "lose" not in sentence


def test_a_loss_beyond_chance(results):
    sentence = said(results(source={FOG: 100, CLEAN: 180}, tent={FOG: 60, CLEAN: 150}))
    assert sentence.startswith("Under fog, tent (-20.0 ± ") and ") loses against the unadapted model; on clean" in sentence
    assert sentence.endswith("on clean images, tent (-15.0 ± 5.1) loses against it.") and " gains" not in sentence


def test_all_of_these_are_one_sentence_with_the_best_first(results):
    counts = {"source": 100, "tent": 101, "dct": 120, "keel": 140, "sar": 60, "eta": 50}
    sentence = said(results(**{method: {FOG: count, SNOW: count} for method, count in counts.items()}))
    order = [
        "keel gains 20.0 ±",
        "; dct (+10.0 ±",
        "gains, too; tent (+0.5 ±",
        "does not differ",
        "; sar (-20.0 ±",
        "and eta",
    ]
    places = [sentence.index(words) for words in order]
    assert places == sorted(places) and sentence.endswith("lose against it.") and sentence.count(".0 ± ") == 4
    assert sentence.count("the unadapted model") == 1


def test_many_methods_are_counted(results):
    rows = {f"method{number}": {FOG: 100} for number in range(9)}
    assert "and 5 more do not differ" in said(results(source={FOG: 100}, **rows))


def test_clean_images_alone(results):
    sentence = said(results(source={CLEAN: 180}, tent={CLEAN: 120}))
    assert sentence == "On clean images, tent (-30.0 ± 6.4) loses against the unadapted model."


def test_there_is_nothing_to_say(results):
    assert said(results(tent={FOG: 100}, keel={FOG: 140})) is None, "without the unadapted model"
    assert said(results(source={FOG: 100})) is None
    unpaired = [replace(o, result=replace(o.result, by_image={})) for o in results(source={FOG: 100}, keel={FOG: 140})]
    assert said(unpaired) is None, "whether it is chance is not known"
    assert said(results(source={FOG: 100, SNOW: 100}, keel={FOG: 140})) is None, "a part of the shifts is not their mean"


def test_the_mean_is_without_clean_images_in_separate_streams_and_in_one(results):
    rows = dict(source={CLEAN: 180, FOG: 100, SNOW: 40}, keel={CLEAN: 180, FOG: 140, SNOW: 60})
    for continual in (False, True):
        grid = Grid(results(continual, **rows))
        keel = next(row for row in grid.rows if row.method == "keel")
        assert grid.cell(keel, Summary.MEAN).accuracy == pytest.approx(50)
        assert grid.cell(keel, Summary.SECOND_HALF).accuracy == pytest.approx(20)
        assert grid.cell(keel, CLEAN).accuracy == pytest.approx(90)
        assert grid.gain(keel, Summary.MEAN).points == pytest.approx(15)
        assert grid.gain(keel, Summary.SECOND_HALF).points == pytest.approx(20)
        assert said(results(continual, **rows)).startswith("In the mean of 2 shifts, keel gains 15.0 ± ")


def test_it_is_printed_below_its_table(results, capsys):
    show(results(source={FOG: 100}, keel={FOG: 140}), PlainConsole(width=100))
    out = capsys.readouterr().out
    assert out.index("second half") < out.index("Under fog, keel gains 20.0 ±")
