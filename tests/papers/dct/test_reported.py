"""The paper's numbers as data, and the protocols that Source accuracies give away."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError
from statistics import fmean

import numpy as np
import pytest

from acclimate.data.corruptions import CORRUPTIONS
from acclimate.data.streams import SETTINGS
from acclimate.errors import ConfigError
from acclimate.papers.dct.protocols import known_sources, match_protocol
from acclimate.papers.dct.reported import claims, figures, reported, tables
from support import SHARED

PAPER = SHARED / "paper.tex"
SIZES = {  # methods, columns
    "normal": (11, 15), "label-shift": (6, 15), "bs1": (6, 15),
    "normal-3": (5, 15), "label-shift-3": (5, 15), "bs1-3": (5, 15),
    "vit-l-normal": (4, 15), "vit-l-bs1": (4, 15), "mixed": (4, 2),
    "imagenet-r": (4, 2), "visda-2021": (4, 2), "office-home": (4, 12), "ablation": (3, 0), "cost": (5, 1),
}  # fmt: skip


# --- tables


def test_every_table_is_there_with_all_its_rows_and_columns():
    assert {key: (len(t.rows), len(t.columns)) for key, t in tables().items()} == SIZES
    for table in tables().values():
        for row in (*table.rows.values(), *table.deviations.values()):
            assert len(row) == len(table.columns)
        assert set(table.deviations) <= set(table.rows) and set(table.average_deviations) <= set(table.averages)
        assert not table.averages or list(table.averages) == list(table.rows)
        assert table.setting is None or table.setting in SETTINGS
        assert not set(table.rows) & set(table.commented_out)


@pytest.mark.parametrize("key", [key for key, (_, columns) in SIZES.items() if columns == 15])
def test_columns_of_imagenet_c_are_our_corruptions_in_their_order(key):
    assert reported(key).data == "imagenet-c"
    assert reported(key).columns == CORRUPTIONS


@pytest.mark.parametrize("key", [key for key, (_, columns) in SIZES.items() if columns >= 12])
def test_averages_recompute(key):
    table = reported(key)
    assert table.averages
    for method, row in table.rows.items():
        assert fmean(row) == pytest.approx(table.averages[method], abs=0.11)
    for row in table.commented_out.values():
        assert fmean(row[:-1]) == pytest.approx(row[-1], abs=0.11)


def test_some_numbers_by_hand():
    assert reported("normal").row("source")["contrast"] == 31.8
    assert reported("normal").averages["dct"] == 66.3
    assert dict(zip(CORRUPTIONS, reported("label-shift").deviations["dct"]))["contrast"] == 0.8
    assert reported("office-home").row("tent")["real_world->clipart"] == 69.7
    assert reported("ablation").averages == {"sar": 63.6, "dct(generator=False)": 63.9, "dct": 66.3}
    assert reported("cost").row("dda") == {"minutes": 5 * 24 * 60}


def test_what_was_not_printed_is_marked():
    assert [key for key, table in tables().items() if not table.printed] == ["mixed"]
    unprinted = {key: list(table.commented_out) for key, table in tables().items() if table.commented_out}
    assert unprinted == {"vit-l-normal": ["dda"], "vit-l-bs1": ["dda"], "mixed": ["eata"], "ablation": ["source"]}


@pytest.mark.parametrize(
    ("key", "doubt"),
    [
        ("normal", "T3A and CoTTA"), ("normal", "AdaContrast, CFA or DePT-G"), ("label-shift", "MEMO row"),
        ("label-shift-3", "Source is 53.8"), ("bs1-3", "Source is 53.8"), ("bs1-3", "bold"),
        ("vit-l-normal", "bold"), ("vit-l-bs1", "bold"), ("mixed", "commented out"), ("office-home", "TENT"),
        ("imagenet-r", "200 classes"), ("visda-2021", "list of images"),
    ],
)  # fmt: skip
def test_doubts_are_named_at_their_table(key, doubt):
    assert any(doubt in sentence for sentence in reported(key).doubts)


def test_the_doubts_follow_from_the_numbers():
    normal, shift, bs1 = reported("normal"), reported("label-shift"), reported("bs1")
    assert normal.rows["memo"] == shift.rows["memo"] == bs1.rows["memo"]
    assert normal.rows["source"] != shift.rows["source"]
    normal, shift, bs1 = reported("normal-3"), reported("label-shift-3"), reported("bs1-3")
    assert normal.rows["dda"] == shift.rows["dda"]
    assert np.abs(np.subtract(normal.rows["tent"], bs1.rows["tent"])).max() < 0.11
    assert sum(bs1.row("dct")[c] == max(bs1.row(m)[c] for m in bs1.rows) for c in CORRUPTIONS) == 8
    for key, columns in {"vit-l-normal": ["shot_noise", "impulse_noise", "motion_blur"],
                         "vit-l-bs1": ["brightness", "pixelate"]}.items():  # fmt: skip
        assert [c for c in columns if reported(key).row("tent")[c] > reported(key).row("dct")[c]] == columns


def test_the_texts_claims_follow_from_the_tables():
    gains = {key: reported(key).averages for key in ("normal", "label-shift", "bs1")}
    for claim in claims():
        assert claim.table is None or claim.table in tables()
        if claim.table in gains:
            *_, second, best = sorted(gains[claim.table].values())
            assert best - second == pytest.approx(claim.value, abs=0.01)


def test_an_unknown_name_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'label-shift'"):
        reported("label_shifts")
    with pytest.raises(ConfigError, match="figure"):
        reported("sensitivity")
    with pytest.raises(ConfigError, match="Did you mean 'cotta'"):
        reported("normal").row("cota")
    with pytest.raises(ConfigError, match="column of the table 'mixed'"):
        reported("mixed").only("4")


def test_a_table_cannot_be_spoilt_for_others():
    tables().clear()
    reported("normal").rows["source"] = ()
    assert reported("normal").averages["source"] == 51.0 and len(reported("normal").rows["source"]) == 15
    with pytest.raises(FrozenInstanceError):
        reported("normal").key = "mine"


def test_figures_are_listed():
    assert {"attention-distance", "rollout", "conditioners", "sensitivity"} <= set(figures())
    assert not figures()["conditioners-more"].printed
    assert not set(figures()) & set(tables())


# --- against the paper's source, where it is at hand


def numbers(line: str) -> list[float]:
    """The numbers of a table's line, without those in commands and, for times, in minutes."""
    cells = re.sub(r"\\(cite|rowcolor)\{[^}]*\}", "", line).split("&")[1:]
    units = {"hours": 60, "days": 24 * 60}
    scale = next((factor for unit, factor in units.items() if unit in line), 1)
    return [scale * float(value) for cell in cells for value in re.findall(r"\d+(?:\.\d+)?", cell)]


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's LaTeX source is not beside the repository")
def test_every_number_is_that_of_the_papers_source():
    bodies = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", PAPER.read_text(encoding="utf-8"), re.DOTALL)
    assert len(bodies) == len(tables())
    by_label = {re.search(r"\\label\{(.*?)\}", body)[1]: body for body in bodies}
    for table in tables().values():
        lines = by_label[table.label].partition(r"\midrule")[2].splitlines()
        theirs = sorted(found for line in lines if "&" in line and (found := numbers(line)))
        ours = [[*row, *([table.averages[m]] if table.averages else [])] for m, row in table.rows.items()]
        ours += [[*row, *([table.average_deviations[m]] if table.averages else [])] for m, row in table.deviations.items()]
        ours += [list(row) for row in table.commented_out.values()]
        assert theirs == sorted(ours), table.key


# --- protocols


def case(each) -> dict[str, object]:
    return {"data": each.data, "severity": each.severity}


def test_the_known_accuracies_are_those_of_the_tables():
    values = {(e.data, e.severity, e.mean) for e in known_sources()}
    assert len(values) == len(known_sources())
    for each in known_sources():
        if each.per_column is not None:
            assert fmean(each.per_column.values()) == pytest.approx(each.mean, abs=0.11)
            assert tuple(each.per_column) == CORRUPTIONS
    assert ("imagenet-r", None, reported("imagenet-r").row("source")["normal"]) in values
    assert ("visda-2021", None, reported("visda-2021").row("source")["normal"]) in values


@pytest.mark.parametrize("each", known_sources(), ids=lambda e: f"{e.data}-{e.severity}-{e.mean}")
def test_each_known_accuracy_is_recognised(each):
    for columns in (None, each.per_column):
        found = match_protocol(each.mean, columns, **case(each))
        assert found.nearest == each and found.distance == 0 and found.also == ()
        assert found.verdict.startswith("matches") and each.model in found.verdict
        assert (found.warning is not None) == each.wrong


@pytest.mark.parametrize("each", known_sources(), ids=lambda e: f"{e.data}-{e.severity}-{e.mean}")
@pytest.mark.parametrize("samples", [1000, 5000, 50_000])
def test_a_sample_of_images_is_recognised(each, samples):
    rng = np.random.default_rng(samples)
    for _ in range(20):
        p = np.array(list(each.per_column.values()) if each.per_column else [each.mean] * 15)
        drawn = 100 * rng.binomial(samples, p / 100) / samples
        columns = dict(zip(CORRUPTIONS, drawn.tolist())) if each.per_column else None
        found = match_protocol(drawn.mean(), columns, samples=samples, **case(each))
        assert found.nearest == each and found.verdict.startswith("matches")
        assert (found.warning is not None) == each.wrong


def test_a_warning_tells_the_fix():
    for found in (
        match_protocol(29.9, data="imagenet-c", severity=5),
        match_protocol(31.0, data="imagenet-c", severity=5),
        match_protocol(53.8, reported("label-shift-3").row("source"), data="imagenet-c", severity=3),
    ):
        assert found.warning is not None and "mean and std from the model's own timm configuration" in found.warning
    assert match_protocol(51.1, reported("label-shift").row("source"), data="imagenet-c", severity=5).warning is None


def test_the_verdict_has_three_degrees():
    words = [match_protocol(51.0 + off, data="imagenet-c", severity=5).verdict for off in (0.4, 1.2, 2.2)]
    assert [word.split()[0] for word in words] == ["matches", "near", "unlike"]
    assert "(1.2 points off)" in words[1]


def test_a_mean_that_coincides_does_not_deceive_the_columns():
    source = reported("normal").row("source")
    turned = dict(zip(source, reversed(source.values())))
    assert match_protocol(51.0, data="imagenet-c", severity=5).verdict.startswith("matches")
    assert match_protocol(51.0, turned, data="imagenet-c", severity=5).verdict.startswith("unlike any known protocol")


def test_some_columns_are_enough_and_their_mean_is_not_taken_for_the_whole():
    source = reported("normal").row("source")
    some = {name: source[name] for name in ("gaussian_noise", "glass_blur", "contrast")}
    found = match_protocol(fmean(some.values()), some, data="imagenet-c", severity=5)  # 37.6, near torchvision's 39.8
    assert found.nearest is not None and found.nearest.mean == 51.0 and found.distance == 0
    extra = {**source, "spatter": 0.0}
    assert match_protocol(fmean(extra.values()), extra, data="imagenet-c", severity=5).distance == 0


def test_few_images_leave_it_open():
    found = match_protocol(53.0, data="imagenet-c", severity=5, samples=200)
    assert found.verdict.startswith("matches") and "200 images do not exclude" in found.verdict
    assert {found.nearest.mean, *(e.mean for e in found.also)} >= {51.0, 55.5}
    assert match_protocol(53.0, data="imagenet-c", severity=5).verdict.startswith("near")


@pytest.mark.parametrize(
    ("columns", "data", "severity"),
    [
        (None, "bundled", 2), (None, "imagenet-c", 2), (None, "imagenet-c", None), (None, "office-home", None),
        ({"spatter": 60.0}, "imagenet-c", 5),
    ],
)  # fmt: skip
def test_what_is_not_comparable_is_said_to_be_so(columns, data, severity):
    found = match_protocol(60.0, columns, data=data, severity=severity)
    assert found.nearest is None and found.distance is None and found.warning is None
    assert found.verdict.startswith("not comparable") and data in found.verdict


def test_the_columns_of_a_single_data_set_need_no_name_of_ours():
    found = match_protocol(57.2, {"imagenet-r": 57.2}, data="imagenet-r", severity=None)
    assert found.verdict.startswith("matches")


@pytest.mark.parametrize("options", [{"mean": float("nan")}, {"mean": 101.0}, {"per_column": {"fog": -1.0}}, {"samples": 0}])
def test_impossible_values_are_errors(options):
    with pytest.raises(ConfigError):
        match_protocol(**{"mean": 51.0, "data": "imagenet-c", "severity": 5, **options})
