"""The scripts that made the bundled model and the tables still run, and do what they say."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from acclimate.data import bundled

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(module, monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


@pytest.fixture
def fashion(tmp_path):
    """Files in Fashion-MNIST's format, with few images."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 128), ("t10k", 40)):
        images, labels = rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 10, count, np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return tmp_path


def test_an_interrupted_training_ends_with_the_same_weights(fashion, tmp_path, monkeypatch):
    train = tool("train_bundled")

    def arguments(name: str) -> list[object]:
        out = ["--checkpoint", tmp_path / f"{name}.pt", "--out", tmp_path / f"{name}.safetensors"]
        return ["--data", fashion, "--epochs", 2, "--full", 1, "--refine", 1, *out]

    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        call(train, monkeypatch, *arguments("whole"))
        real = train.run_epoch

        def interrupted(epoch, *rest):
            if epoch == 1:
                raise KeyboardInterrupt
            return real(epoch, *rest)

        monkeypatch.setattr(train, "run_epoch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(train, monkeypatch, *arguments("cut"))
        assert not (tmp_path / "cut.safetensors").exists()
        monkeypatch.setattr(train, "run_epoch", real)
        with pytest.raises(SystemExit, match="another training"):
            call(train, monkeypatch, *arguments("cut"), "--seed", 1)
        call(train, monkeypatch, *arguments("cut"))
    finally:
        torch.use_deterministic_algorithms(deterministic)
    whole, cut = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == bundled.architecture().state_dict().keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_the_denoiser_goes_on_where_it_was(fashion, tmp_path, monkeypatch):
    train = tool("train_denoiser")

    def arguments(name: str, updates: int) -> list[object]:
        out = ["--checkpoint", tmp_path / f"{name}.pt", "--out", tmp_path / f"{name}.safetensors"]
        return ["--data", fashion, "--updates", updates, "--batch-size", 2, *out]

    threads = torch.get_num_threads()
    try:
        monkeypatch.setattr(train, "EVERY", 1)
        call(train, monkeypatch, *arguments("whole", 2))
        real = train.learning_rate

        def interrupted(update, updates):
            if update == 1:
                raise KeyboardInterrupt
            return real(update, updates)

        monkeypatch.setattr(train, "learning_rate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(train, monkeypatch, *arguments("cut", 2))
        monkeypatch.setattr(train, "learning_rate", real)
        with pytest.raises(SystemExit, match="another training"):
            call(train, monkeypatch, *arguments("cut", 3))
        call(train, monkeypatch, *arguments("cut", 2))
    finally:
        torch.set_num_threads(threads)
    whole, cut = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == load_file(bundled.DENOISER).keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_training_uses_no_more_operations_than_it_says():
    stretching = {"AutoContrast", "Equalize"}  # named in the docstring
    geometry = {"Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"}
    levels = {"PosterizeIncreasing", "SolarizeIncreasing"}
    assert set(tool("train_bundled").OPERATIONS) == stretching | geometry | levels


def test_tuning_gives_every_method_the_same_trials(tmp_path, monkeypatch):
    tune = tool("tune_bundled")
    out = tmp_path / "tuned.json"
    names = ["tent", "sar", "dct", "eata"]
    short = ["--trials", 2, "--images", 8, "--runs", tmp_path / "runs", "--out", out]
    for part in (names[:3], names[3:]):  # the others keep what was found for them
        call(tune, monkeypatch, "--methods", ",".join(part), *short)
    outcome = json.loads(out.read_text())
    assert {method: len(trials) for method, trials in outcome["trials"].items()} == dict.fromkeys(names, 2)
    tried = [outcome["trials"][method][1]["options"] for method in ("tent", "sar", "dct")]
    assert tried[0]["lr"] == tried[1]["lr"] == tried[2]["lr"] and tried[1]["margin"] == tried[2]["margin"]
    for method, trials in outcome["trials"].items():
        assert all(len(trial["accuracy"]) == len(tune.SEVERITY) for trial in trials)
        best = max(trials, key=lambda trial: trial["mean"])
        assert outcome["chosen"][method] == best["options"]


def test_the_comparison_puts_its_tables_between_its_marks(tmp_path, monkeypatch):
    page = tmp_path / "results.md"
    page.write_text("# Results\n\n<!-- bs1 -->\nold\n<!-- end of bs1 -->\n\nHow to read it.\n")
    few = ["--methods", "source,roid", "--corruptions", "fog", "--images", 4, "--runs", tmp_path / "runs", "--page", page]
    call(tool("compare_bundled"), monkeypatch, "--settings", "bs1,mixed", *few)
    text = page.read_text()
    assert "old" not in text and text.index("<!-- end of bs1 -->") < text.index("How to read it.") < text.index("## mixed")
    assert text.count("| method | fog | mean | second half | over source |") == 2 and "- stream: bs1, batches of 1" in text
    summary = text.partition("<!-- means -->")[2]
    assert "| method | bs1 | mixed |" in summary and summary.count("\n| ") == 5, "with and without recentring"
    specs = [json.loads(path.read_text())["spec"] for path in (tmp_path / "runs").glob("roid*/result.json")]
    assert sorted(spec["config"]["window"] or 0 for spec in specs) == [0, 0, 16, 16]


def test_the_page_gets_the_output_of_the_bench_and_the_readme_its_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.syspath_prepend(TOOLS)
    page = tmp_path / "bench.md"
    page.write_text("<!-- output of the bench -->\nearlier\n<!-- end of output of the bench -->\nMore.\n")
    script, where = tool("refresh_readme"), ["--page", page, "--picture", tmp_path / "stream.png"]
    call(script, monkeypatch, "--images", 2, "--runs", tmp_path / "runs", *where)
    text = page.read_text()
    assert "earlier" not in text and text.startswith("<!-- output of the bench -->\n```text\nTop-1 accuracy in %: bundled")
    assert "In the mean of 8 shifts" in text and text.endswith("```\n<!-- end of output of the bench -->\nMore.\n")
    assert all(line == line.rstrip() for line in text.splitlines()) and "Results: " not in text
    assert (tmp_path / "stream.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_stream_has_an_accuracy_in_each_part(monkeypatch, capsys):
    options = ["--rounds", 2, "--images", 3, "--long", 40, "--threads", 1, "--methods", "source,keel"]
    call(tool("long_streams"), monkeypatch, *options)
    rounds, long = capsys.readouterr().out.split("\n\n40 images under frost")
    assert "| method | 1 | 2 |" in rounds and f"| {' | '.join(map(str, range(1, 11)))} |" in long
    for table, right in ((rounds, 45), (long, 4)):
        values = [
            line.strip("| ").split(" | ")[1:] for line in table.splitlines() if line.startswith(("| source", "| keel"))
        ]
        assert len(values) == 2 and all(len(row) == len(values[0]) for row in values)
        for value in map(float, values[0]):
            assert value == pytest.approx(100 * round(value * right / 100) / right, abs=0.06)  # a count of so many images


def test_the_photographs_are_optional(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="skipped"):
        call(tool("try_imagenet_tiny"), monkeypatch, "--assets", tmp_path)


def test_the_check_on_photographs_writes_its_table(tmp_path, monkeypatch, capsys):
    script = tool("try_imagenet_tiny")
    save_file(timm.create_model("vit_tiny_patch16_224").state_dict(), tmp_path / script.WEIGHTS)
    (tmp_path / "nips17" / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    with (tmp_path / "nips17" / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "label"])
        for i in range(3):
            Image.fromarray(rng.integers(0, 256, (248, 248, 3), np.uint8)).save(tmp_path / "nips17" / "images" / f"{i}.png")
            rows.writerow([f"images/{i}.png", i])
    options = ["--corruptions", "fog,contrast", "--severities", "3", "--methods", "source,neo", "--runs", tmp_path / "runs"]
    call(script, monkeypatch, "--assets", tmp_path, *options, "--against", "neo")
    shown = capsys.readouterr().out
    assert "| method | fog | contr | mean |" in shown and "\nneo above source: " in shown
    specs = [json.loads(path.read_text())["spec"] for path in (tmp_path / "runs").glob("*/result.json")]
    assert [spec["preprocessing"][0]["corruption constants"] for spec in specs] == ["imagenet-c"] * 4


def test_false_alarms_are_counted_once_for_each_stream(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(TOOLS)
    options = ["--streams", 2, "--images", 70, "--threads", 1, "--runs", tmp_path]
    call(tool("false_alarms"), monkeypatch, *options)
    files = {path: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(files) == 2 and all(not each["alarms"] for each in files.values())
    path, each = files.popitem()
    path.write_text(json.dumps(each | {"alarms": ["slower: x", "resting: y"]}))
    call(tool("false_alarms"), monkeypatch, *options)
    assert "keel, 2 streams of 70 images: 1 with an alarm" in capsys.readouterr().out
