"""`acclimate.bench(...)`, results as objects and as tables, and the commands table and paper."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import acclimate
from acclimate.cli import main
from acclimate.core import registry
from acclimate.data import bundled
from acclimate.data.catalog import SHOWN, Data
from acclimate.data.domains import Corrupted, DomainKey, Images, Subset
from acclimate.errors import ConfigError, ModelError, StateError
from acclimate.evaluation.formats import latex, markdown, write_table
from acclimate.evaluation.grid import Execution
from acclimate.evaluation.results import Results
from acclimate.evaluation.spec import Protocol
from acclimate.evaluation.store import Store
from acclimate.evaluation.tables import Grid, Summary, differences
from acclimate.models.loading import load_model, pick_device
from acclimate.papers.dct import experiments as paper
from acclimate.papers.dct.protocols import match_source
from acclimate.papers.dct.reported import reported
from acclimate.report.page import page
from acclimate.testing.check import tiny_model

SMALL = dict(images=24, batch_size=12)
FOG, SNOW = DomainKey("fog", 5), DomainKey("snow", 5)


def row(grid, label):
    """Return the row with this label."""
    return next(row for row in grid.rows if grid.label(row) == label)


def part(images, chosen):
    return Images(*(array[chosen] for array in images))


def some_images(count):
    images = bundled.images()
    return part(images, Subset.sample(Corrupted(images, mean=bundled.MEAN, std=bundled.STD), count).chosen)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(runs):
    methods = {"source": {}, "tent": {"lr": 0.1}}
    return acclimate.bench(
        methods=methods, corruptions=["snow", "fog"], seeds=[0, 1], settings=["normal", "bs1"], out=runs, **SMALL
    )


def test_the_module_is_a_function_and_still_a_module(results):
    assert isinstance(results, Results) and len(results) == 16
    assert acclimate.evaluation.store.Store is Store
    assert results[0].spec.method == "source" and results[0].spec.dataset == "bundled"
    assert isinstance(results[:2], Results)
    assert {o.spec.method for o in results.where(setting="bs1", seed=1)} == {"source", "tent"}


def test_results_show_themselves(results):
    text = repr(results)
    assert "normal" in text and "bs1" in text and "tent" in text and "snow" in text
    assert "<pre" in results._repr_html_() and "tent" in results._repr_html_()
    assert repr(Results([])) == "Results([])"


def test_a_notebook_shows_results_once(results, monkeypatch):
    """Rich displays what it prints in a notebook, even if it prints to a file."""
    displayed = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *output: displayed.append(output))
    assert "tent" in repr(results) and "tent" in results._repr_html_()
    assert not displayed


def test_results_are_a_data_frame(results):
    frame = results.frame()
    assert len(frame) == 16 and set(frame.domain) == {"snow", "fog"} and set(frame.severity) == {5}
    mine = frame[(frame.method == "tent") & (frame.domain == "fog") & (frame.setting == "normal")].accuracy.mean()
    grid = results.grids()["normal"]
    assert 100 * mine == pytest.approx(grid.cell(row(grid, "tent"), FOG).accuracy)


def test_a_method_with_several_options_has_several_rows(runs):
    methods = ["source", ("tent", {}), ("tent", {"lr": 0.1}), ("tent", {"lr": 0.1, "momentum": 0.0})]
    found = acclimate.bench(methods=methods, corruptions=["fog"], out=runs, tuned=False, **SMALL)
    grid = Grid(found)
    assert [grid.label(row) for row in grid.rows] == ["source", "tent", "tent(lr=0.1)", "tent(lr=0.1, momentum=0.0)"]
    assert [row.method for row in grid.rows] == ["source", "tent", "tent", "tent"]
    text = page(grid, title="t")
    assert all(f'title="{grid.label(row)}"' in text for row in grid.rows), "the page has the same rows"


def test_a_recentred_source_model_is_not_the_source_model():
    chosen = [("source", {"recentre": True}), ("source", {}), ("neo", {})]
    grid = acclimate.bench(methods=chosen, corruptions=["fog"], images=8, batch_size=4, out=None).grids()["normal"]
    assert [grid.label(row) for row in grid.rows] == ["source(recentre=order)", "source", "neo"]
    assert grid.source == grid.rows[1]


def test_an_infinite_option_is_kept(tmp_path):
    how = dict(methods={"sar": {"margin": float("inf")}}, corruptions=["fog"], out=tmp_path, **SMALL)
    (outcome,) = acclimate.bench(**how)
    assert outcome.spec.config["margin"] == "inf" and outcome.result.used > 0
    (again,) = acclimate.bench(**how)
    assert again.found


def test_tuned_learning_rates_follow_the_batch_as_a_methods_own_do():
    """Of those that the method scales: SAR's norms, not DCT's generators, not the rate that CoTTA keeps."""
    at_64, at_1 = bundled.tuned_options(), bundled.tuned_options(1)
    assert at_1["sar"]["lr"] == pytest.approx(at_64["sar"]["lr"] / 64)
    assert at_1["dct"]["lr_generator"] == at_64["dct"]["lr_generator"]
    results = acclimate.bench(
        methods=["sar"], corruptions=["fog"], settings=["normal", "bs1"], out=None, images=64, batch_size=64
    )
    assert [o.spec.config["lr"] for o in results] == [at_64["sar"]["lr"], at_1["sar"]["lr"]]


@pytest.mark.parametrize("family", ["hf", "torchvision"])
def test_methods_that_augment_learn_the_normalisation_from_the_data(family):
    """Models of these families do not say it."""
    images = Images(np.zeros((8, 32, 32, 3), np.uint8), np.zeros(8, np.int64), np.arange(8))
    domains = [Corrupted(images, "gaussian_noise", 3, mean=bundled.MEAN, std=bundled.STD)]
    (outcome,) = acclimate.bench(tiny_model(family), domains, methods=["spa"], batch_size=4, out=None)
    assert outcome.result.samples == 8


def test_reference_is_without_a_guard_and_said_in_the_card():
    found = acclimate.bench(methods=["tent"], corruptions=["fog"], reference=True, out=None, images=12)
    card = found[0].spec.card
    assert card["guard"] == "off" and card["fidelity"] == "the authors' released code"


def test_the_card_says_how_a_number_was_made(results):
    card = results[0].spec.card
    assert "mean 0.5, std 0.5" in card["preprocessing"] and "cifar-10-c" in card["preprocessing"]
    assert "bundled, weights" in card["model"] and "threads" in card["device"] and "torch" in card["versions"]
    assert "SHA-256" in card["order"] and card["images"] == "24" and card["domains"] == "snow/5"
    normal = results.where(setting="normal")
    assert all(o.spec.shared == results[0].spec.shared for o in normal)
    assert len({tuple(o.spec.card.items()) for o in normal}) == len(normal)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": 7}, "batches of 7"),
        ({"versions": {"torch": "0.4"}}, "torch 0.4"),
        ({"protocol": {"precision": "bfloat16"}}, "bfloat16"),
        ({"protocol": {"predict": "after"}}, "after the update"),
        ({"protocol": {"guard": False}}, "guard"),
        ({"config": {"reference": True}}, "authors"),
        ({"model": {"weights": "0123"}}, "weights 0123"),
        ({"model": {"device": "cpu, 64 threads"}}, "64 threads"),
        ({"dataset": "imagenet-c"}, "imagenet-c"),
        ({"order": "another"}, "did not meet the same on snow/5, seed 0"),
        ({"data": ["another"]}, "did not meet the same on snow/5, seed 0"),
        ({"preprocessing": [{"mean": [0.485, 0.456, 0.406]}]}, "preprocessing, mean: [0.485, 0.456, 0.406]"),
    ],
)
def test_a_table_refuses_results_of_different_protocols_and_says_why(change, named, results):
    mine = results.where(setting="normal")
    spec = mine[0].spec
    change = {k: {**getattr(spec, k), **v} if isinstance(v, dict) else v for k, v in change.items()}
    mixed = [replace(mine[0], spec=replace(spec, **change)), *mine[1:]]
    with pytest.raises(ConfigError, match="do not belong in one table") as refused:
        Grid(mixed)
    assert named in str(refused.value) and "--mix" in str(refused.value)
    grid = Grid(mixed, mix=True)
    assert grid.differences == differences(mixed) and any(named in line for line in grid.differences)


def test_clean_images_stand_beside_corrupted_ones():
    found = acclimate.bench(methods=["source"], corruptions=["clean", "fog"], out=None, images=12)
    assert Grid(found).domains == [DomainKey("clean"), FOG] and "clean" in found.table()


def test_every_format_says_the_same(results):
    grid = results.grids()["normal"]
    tent = row(grid, "tent")
    cell, gain = grid.cell(tent, SNOW), grid.gain(tent, SNOW)
    lines = list(csv.DictReader(io.StringIO(write_table("csv", grid, "t"))))
    mine = next(line for line in lines if (line["method"], line["column"]) == ("tent", "snow"))
    values = dict(accuracy=cell.accuracy, deviation=cell.deviation, over_source=gain.points, interval=gain.interval)
    assert {name: float(mine[name]) for name in values} == pytest.approx(values, abs=1e-4) and mine["seeds"] == "2"
    content = json.loads(write_table("json", grid, "t"))
    assert content["rows"]["tent"]["cells"]["snow"] == pytest.approx({**values, "seeds": 2}, abs=1e-4)
    assert content["rows"]["tent"]["method"] == "tent" and content["rows"]["tent"]["options"]["lr"] == "0.1"
    assert content["protocol"] == results[0].spec.shared and len(content["runs"]) == 8
    shown = f"{cell.accuracy:.1f}"
    assert shown in write_table("latex", grid, "t") and shown in write_table("markdown", grid, "t")
    assert shown in page(grid, title="t")
    text = write_table("terminal", grid, "t")
    assert shown in text and str(gain) in text and "interval over images" in " ".join(text.split())


def test_numbers_for_machines_are_rounded(results):
    grid = results.grids()["normal"]
    cells = json.loads(write_table("json", grid, "t"))["rows"]["tent"]["cells"].values()
    numbers = [str(value) for cell in cells for value in cell.values()]
    numbers += [word for line in write_table("csv", grid, "t").splitlines()[1:] for word in line.split(",")[3:]]
    assert all(len(number.partition(".")[2]) <= 4 for number in numbers)


def test_latex_has_the_papers_layout(results):
    text = latex(results.grids()["normal"], "Accuracy (%) & more_of it")
    assert r"\caption{Accuracy (\%) \& more\_of it}" in text
    assert r"\begin{tabular}{l|cc|c}" in text and "Method & snow & fog & Avg. " in text
    assert r"$\pm" in text and text.count("{") == text.count("}")


def as_imagenet_c(outcomes, severity=5):
    """Return runs as if they had been of ImageNet-C."""
    return [
        replace(
            o,
            spec=replace(o.spec, dataset="imagenet-c", domains=[DomainKey(key.name, severity)]),
            result=replace(o.result, per_domain={DomainKey(key.name, severity): o.result.mean}, by_image={}),
            folder=None,
        )
        for o in outcomes
        for key in o.spec.domains
    ]


def test_the_papers_numbers_stand_beside_ours(results):
    table, grid = reported("normal"), Grid(as_imagenet_c(results.where(setting="normal")))
    fitted = table.fitted(grid)
    assert fitted == table and fitted.mismatches(grid) == []
    text = markdown(grid, fitted)
    assert f"*{table.row('sar')['snow']:.1f}*" in text and "*dct, paper*" in text
    assert f"*{table.averages['sar']:.1f}*" not in text.splitlines()[-1], "two columns have another mean than fifteen"
    html = page(grid, title="t", paper=fitted)
    assert "paper" in html and table.doubts[0][:30] in html
    assert "the means do not compare" in html


def test_the_papers_numbers_do_not_stand_beside_other_data_severities_or_settings(results):
    normal = results.where(setting="normal")
    with pytest.raises(ConfigError, match="data: imagenet-c there, bundled here; severity: 3 there, 5 here"):
        reported("normal-3").fitted(Grid(normal))
    with pytest.raises(ConfigError, match=r"severity: 3 there, 5 here.*--mix"):
        reported("normal-3").fitted(Grid(as_imagenet_c(normal)))
    with pytest.raises(ConfigError, match="setting: bs1 there, normal here"):
        reported("bs1").fitted(Grid(as_imagenet_c(normal)))
    with pytest.raises(ConfigError, match="setting: mixed there, normal here"):
        reported("mixed").fitted(Grid(as_imagenet_c(normal)))
    with pytest.raises(ConfigError, match="minutes"):
        reported("cost").fitted(Grid(normal), mix=True)
    mixed = reported("normal-3").fitted(Grid(normal), mix=True)
    assert len(mixed.mismatches(Grid(normal))) == 2
    assert f"{mixed.row('sar')['snow']:.1f}" in markdown(Grid(normal), mixed)


def test_where_the_papers_columns_are_settings_or_severities_that_of_the_runs_is_taken(results):
    def one(setting, **changes):
        outcome = results.where(setting="bs1", method="source")[0]
        return Grid([replace(outcome, spec=replace(outcome.spec, setting=setting, **changes))])

    single = reported("imagenet-r").fitted(one("bs1", dataset="imagenet-r", domains=[DomainKey("imagenet-r")]))
    assert single.setting == "bs1" and single.columns == ("bs1",)
    assert single.averages == {"source": 57.2, "tent": 61.5, "sar": 61.8, "dct": 65.0}
    assert single.rows["dct"] == (65.0,) and single.average_deviations == {"dct": 0.4}
    mixed = reported("mixed").fitted(one("mixed", dataset="imagenet-c", domains=[DomainKey("fog", 3)]))
    assert mixed.severity == 3 and mixed.averages["tent"] == 72.8 and not mixed.printed
    assert mixed.commented_out == {"eata": (69.6,)}
    with pytest.raises(ConfigError, match="column of the table 'mixed'"):
        reported("mixed").only("4")


def test_the_source_row_tells_the_protocol(results):
    mine = results.where(setting="normal", method="source", seed=0)[0]
    accuracy = reported("normal").row("source")
    grid = Grid(
        [
            replace(
                mine,
                spec=replace(mine.spec, dataset="imagenet-c", domains=[key], images=[50_000]),
                result=replace(mine.result, per_domain={key: value / 100}, mean=value / 100),
            )
            for name, value in accuracy.items()
            for key in [DomainKey(name, 5)]
        ]
    )
    assert match_source(grid).verdict.startswith("matches vit_base_patch16_224.augreg_in21k_ft_in1k")
    assert match_source(results.grids()["normal"]).nearest is None, "nothing is known of the bundled images"
    assert match_source(Grid(results.where(setting="normal", method="tent"))) is None


def test_a_class_mask_and_unknown_labels_reach_the_run():
    images = some_images(40)
    how = dict(mean=bundled.MEAN, std=bundled.STD)
    some = [0, 1, 8]
    masked = part(images, np.flatnonzero(np.isin(images.labels, some)))
    masked = masked._replace(labels=np.searchsorted(some, masked.labels))
    data = Data("some", [Corrupted(masked, **how)], ["a", "b", "c"], classes=some)
    found = acclimate.bench(data=data, methods=["source"], out=None)
    assert found[0].result.top1 > 0.8 and found[0].spec.protocol["classes"].startswith("3, ")

    unknown = images._replace(labels=np.where(np.arange(40) % 4 == 0, 10, images.labels))
    data = Data("some", [Corrupted(unknown, **how)], bundled.CLASSES, unknown=10)
    (outcome,) = acclimate.bench(data=data, methods=["source"], out=None)
    (plain,) = acclimate.bench(data=[Corrupted(images, **how)], methods=["source"], out=None)
    assert plain.result.top1 - 0.25 <= outcome.result.top1 <= 0.75
    assert np.isfinite(outcome.result.nll)


def test_a_subset_is_always_the_same():
    whole = Corrupted(some_images(50), mean=bundled.MEAN, std=bundled.STD)
    some = Subset.sample(whole, 20)
    assert len(some.labels) == 20 and some.identity != whole.identity
    assert (some.load(np.arange(3)) == whole.load(some.chosen[:3])).all()
    with pytest.raises(acclimate.errors.InputError, match="has 50"):
        Subset.sample(whole, 51)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(data="imagenet-c"), "root="),
        (dict(data="imagenet-x", root="."), "Unknown data set"),
        (dict(model="vit_base_patch16_42"), "timm has no model"),
        (dict(model="vit_base_patch16_224.augreg3"), "no weights"),
        (dict(settings=["gradual", "normal"]), "gradual"),
        (dict(images=9000), "at most 8000"),
        (dict(methods=["dtc"]), "'dct'"),
        (dict(device="tpu9"), "device='tpu9'"),
        (dict(weights="x.pth"), "weights of its own"),
        (dict(on="slurm"), "ray"),
        (dict(jobs=0), "jobs=0"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        how = {name: arguments.pop(name) for name in ("device", "jobs", "on") if name in arguments}
        acclimate.bench(**{"out": tmp_path, "execution": Execution(**how), **arguments})
    assert not list(tmp_path.glob("*")), "nothing was begun"


def test_weights_come_from_a_local_file(tmp_path):
    import torch
    from safetensors.torch import save_file
    from timm import create_model

    torch.manual_seed(0)
    weights = create_model("test_vit").state_dict()
    save_file(weights, tmp_path / "w.safetensors")
    model = load_model("test_vit", weights=tmp_path / "w.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    save_file({"x": weights["cls_token"]}, tmp_path / "other.safetensors")
    save_file({k: v for k, v in weights.items() if not k.startswith("head.")}, tmp_path / "headless.safetensors")
    save_file(create_model("test_vit", num_classes=7).state_dict(), tmp_path / "seven.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    assert load_model("test_vit", weights=tmp_path / "seven.safetensors").num_classes == 7
    for name in ("other", "headless", "broken", "absent"):
        with pytest.raises(ModelError, match=name):
            load_model("test_vit", weights=tmp_path / f"{name}.safetensors")
    assert pick_device("cpu").type == "cpu"


# ---- commands ---------------------------------------------------------------------------------------------------


def call(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_table_makes_tables_of_finished_runs(runs, results, tmp_path, capsys):
    arguments = ["--settings", "normal", "--methods", "source,tent", "--format", "markdown", "--mix"]
    code, out, _ = call(capsys, "table", runs, *arguments)
    assert code == 0 and "| method |" in out
    code, out, err = call(capsys, "table", runs, "--format", "csv")
    assert code == 2 and "--setting" in err
    code, out, err = call(capsys, "table", runs, "--settings", "mixed")
    assert code == 2 and "none of the" in err
    assert call(capsys, "table", runs, "--settings", "bs1", "--severities", 3)[0] == 2
    assert call(capsys, "table", runs, "--settings", "bs1", "--severity", 5)[0] == 0
    code, out, err = call(capsys, "table", tmp_path / "nowhere")
    assert code == 2 and "not a folder of runs" in err
    file = tmp_path / "page.html"
    beside = ["--settings", "bs1", "--format", "html", "--out", file, "--paper", "bs1"]
    code, out, err = call(capsys, "table", runs, *beside)
    assert code == 2 and "does not belong beside these runs" in err and not file.exists()
    code, out, err = call(capsys, "table", runs, *beside, "--mix")
    assert code == 0 and file.read_text().startswith("<!doctype html>")
    assert "mixed: the paper's table bs1 has another data: imagenet-c there, bundled here" in err
    code, out, err = call(capsys, "table", runs, "--settings", "bs1", "--paper", "bs2")
    assert code == 2 and "'bs1'" in err


def test_table_takes_streams_of_several_lengths(tmp_path, capsys):
    how = dict(methods=["source", "tent"], corruptions=["fog", "snow"], out=tmp_path, **SMALL)
    acclimate.bench(settings=["continual", "bs1"], **how)
    code, out, err = call(capsys, "table", tmp_path)
    assert code == 0 and "continual" in out and "bs1" in out, err
    acclimate.bench(settings="continual", **{**how, "corruptions": ["fog", "snow", "frost"]})
    code, out, err = call(capsys, "table", tmp_path, "--settings", "continual", "--mix")
    assert code == 0 and "frost" in out, err


def test_table_and_report_know_methods_that_this_process_does_not(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        'import acclimate\nfrom acclimate.methods.tent import Tent\n@acclimate.register("mine")\nclass Mine(Tent): pass\n'
    )
    acclimate.bench(methods=["source", str(tmp_path / "mine.py")], corruptions=["fog"], out=tmp_path, **SMALL)
    del registry._REGISTRY["mine"]
    code, out, err = call(capsys, "table", tmp_path, "--format", "markdown")
    assert code == 0 and "| mine |" in out, err
    assert call(capsys, "report", tmp_path, "-o", tmp_path / "report.html")[0] == 0
    assert 'title="mine"' in (tmp_path / "report.html").read_text()


def test_one_method_with_two_sets_of_options_is_two_rows_of_the_page(tmp_path, capsys):
    methods = ["source", ("tent", {"lr": 0.1}), ("tent", {"lr": 0.2})]
    acclimate.bench(methods=methods, corruptions=["fog"], tuned=False, out=tmp_path, **SMALL)
    file = tmp_path / "page.html"
    for command in (["table", tmp_path, "--format", "html", "--out", file], ["report", tmp_path, "-o", file]):
        assert call(capsys, *command)[0] == 0
        assert 'title="tent(lr=0.1)"' in file.read_text() and 'title="tent(lr=0.2)"' in file.read_text()


def test_results_that_are_not_kept_have_their_intervals(tmp_path):
    how = dict(methods=["source", ("tent", {"lr": 0.1})], corruptions=["fog"], tuned=False, **SMALL)
    kept, lost = (acclimate.bench(out=out, **how).grids()["normal"] for out in (tmp_path, None))
    for grid in (kept, lost, Results(Store(tmp_path).outcomes()).ordered().grids()["normal"]):
        gain = grid.gain(row(grid, "tent"), Summary.MEAN)
        assert gain.interval > 0 and gain == kept.gain(row(kept, "tent"), Summary.MEAN)


def test_bench_takes_options_of_methods_and_parts_of_the_grid(tmp_path, capsys):
    common = ["--corruptions", "fog", "--images", 16, "--out", tmp_path]
    code, out, _ = call(capsys, "bench", "--methods", "tent:lr=0.1,tent:lr=0.2", "--shard", "2/2", *common)
    assert code == 0 and "2/2" not in out and len(list(tmp_path.glob("*/result.json"))) == 1
    assert Store(tmp_path).outcomes()[0].spec.config["lr"] == 0.2
    for wrong, message in (("tent:fast", "option=value"), ("tent:speed=1", "no option")):
        assert message in call(capsys, "bench", "--methods", wrong, *common)[2]
    assert "3/10" in call(capsys, "bench", "--shard", "half", *common)[2]
    assert "leave out" in call(capsys, "bench", "--full", *common)[2]


def test_bench_runs_on_a_folder_of_ones_own(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in range(10):
        (tmp_path / "own" / str(name)).mkdir(parents=True)
        for i in range(2):
            pixels = rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "own" / str(name) / f"{i}.png")
    where = ["--data", "folder", "--root", tmp_path / "own", "--out", tmp_path / "runs", "--workers", 0]
    code, out, err = call(capsys, "bench", "--methods", "source,tent", "--corruptions", "fog", "--severities", 1, *where)
    assert code == 0, err
    assert "fog" in out and "20 images a stream" in " ".join(out.split())
    spec = Store(tmp_path / "runs").outcomes()[0].spec
    assert spec.dataset == "folder" and spec.preprocessing[0]["mean"] == [0.5, 0.5, 0.5]
    code, out, err = call(capsys, "bench", "--methods", "source,neo", "--fresh", *where)
    said = " ".join(out.split())
    assert code == 0 and "In the mean of 8 shifts, neo" in said and "on clean images, neo" in said, err
    assert "The shifts are every second of the 15 corruptions" in said and "What to try next" not in said
    assert {key.name for o in Store(tmp_path / "runs").outcomes() for key in o.spec.domains} == {*SHOWN, "fog"}


def test_bench_without_arguments_shows_clean_images_and_every_second_corruption(tmp_path, capsys):
    code, out, err = call(capsys, "bench", "--images", 8, "--batch-size", 8, "--out", tmp_path)
    assert code == 0, err
    said = " ".join(out.split())
    assert SHOWN == (
        "clean", "gaussian_noise", "impulse_noise", "glass_blur", "zoom_blur", "frost", "brightness", "elastic_transform",
        "jpeg_compression",
    )  # fmt: skip
    assert all(word in out for name in SHOWN for word in name.split("_")), "names are not abbreviated"
    assert "(recentre=order)" in out and "keel" in out and "…" not in out and max(map(len, out.splitlines()[:30])) <= 80
    assert "In the mean of 8 shifts, " in said and "on clean images, " in said and "Means are without clean images." in said
    assert "The shifts are every second of the 15 corruptions of ImageNet-C" in said
    assert out.count("  acclimate bench --") == 3 and "What to try next:" in out
    results = acclimate.bench(images=8, batch_size=8, out=tmp_path)
    assert len(results) == 5 * 9 and all(outcome.found for outcome in results), "Python and the command line do the same"


def test_clean_images_are_one_more_domain_except_in_the_gradual_setting(tmp_path):
    how = dict(methods=["source"], images=2, out=None)
    for setting in ("mixed", "continual"):
        (outcome,) = acclimate.bench(settings=setting, **how)
        assert [key.name for key in outcome.spec.domains] == [*SHOWN]
    (gradual,) = acclimate.bench(settings="gradual", **how)
    assert {key.name for key in gradual.spec.domains} == {*SHOWN} - {"clean"} and len(gradual.spec.domains) == 8 * 5


def test_paper_lists_plans_and_refuses(capsys):
    code, out, _ = call(capsys, "paper")
    assert code == 0 and all(name in out for name in paper.experiments())
    code, out, _ = call(capsys, "paper", "normal", "--dry-run")
    assert code == 0 and "vit_base_patch16_224.augreg_in21k_ft_in1k" in out and "--root IMAGENET-C" in out
    assert "--root" in call(capsys, "paper", "table-normal")[2]
    assert "table-normal" in call(capsys, "paper", "table-normale")[2]
    assert "drawing" in call(capsys, "paper", "rollout")[2]
    code, small, _ = call(capsys, "paper", "normal", "--dry-run", "--scale", "small")
    assert code == 0 and "GPU hours" not in small and "--root" not in small and "(2021, 2022, 2023)" not in small
    assert "acclimate paper table-normal --scale small" in small and "384 images for each method" in small


def test_every_reported_table_has_an_experiment():
    from acclimate.papers.dct.reported import tables

    has = {e.reported for e in paper.experiments().values()} | {"cost"}
    assert set(tables()) <= has


def test_an_experiment_runs_small(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(paper, "SMALL_IMAGES", 16)
    monkeypatch.setattr(paper, "SMALL_CORRUPTIONS", ("brightness",))
    known = dict(paper.experiments())
    for name in ("table-visda-2021", "table-office-home"):  # that all methods run is shown by the table of their cost
        known[name] = replace(known[name], grid={**known[name].grid, "methods": ["source", "dct"]})
    monkeypatch.setattr(paper, "experiments", lambda: known)
    for name in ("table-ablation", "table-imagenet-r", "table-visda-2021", "table-office-home", "table-cost"):
        code, out, err = call(capsys, "paper", name, "--scale", "small", "--out", tmp_path)
        assert code == 0, err
        assert name in out and "dct" in out
    assert any(o.spec.config.get("generator") is False for o in Store(tmp_path).outcomes()), "the ablation has it"
    datasets = {o.spec.dataset for o in Store(tmp_path).outcomes()}
    assert {"imagenet-r (stand-in)", "visda-2021 (stand-in)", "office-home (stand-in)", "bundled"} <= datasets


def test_a_damaged_result_is_named(runs, results, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "result.json").write_text("{}")
    with pytest.raises(StateError, match="one"):
        Store(tmp_path).outcomes()
    with pytest.raises(ConfigError, match="precision"):
        acclimate.bench(corruptions=["fog"], methods=["tent"], protocol=Protocol(precision="float8"), out=None, images=12)
