"""Figures as files, and the report: results, health and figures on one page that a browser shows."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import needs_browser, probe_page

import acclimate
from acclimate.analysis.figures import INK, Figure, SavedFigure, drawing, new
from acclimate.cli import main
from acclimate.errors import ConfigError, StateError
from acclimate.evaluation.store import Store
from acclimate.report.page import page
from acclimate.report.progress import health, resampled

pytest.importorskip("matplotlib")
PROBE = """
const image = document.querySelector(".drawn img");
const ink = () => {  // of the darkest or the lightest pixel: that of the axes
  const canvas = Object.assign(document.createElement("canvas"), {width: image.naturalWidth, height: image.naturalHeight});
  const pen = canvas.getContext("2d");
  pen.drawImage(image, 0, 0);
  const pixels = pen.getImageData(0, 0, canvas.width / 2, canvas.height).data;
  const opaque = [...pixels.keys()].filter((i) => i % 4 === 0 && pixels[i + 3] === 255).map((i) => pixels[i]);
  return [Math.min(...opaque.filter((red) => red > 0)), Math.max(...opaque)];
};
const before = ink();
document.getElementById("theme").click();
const sizes = (selector) => [...document.querySelectorAll(selector)].map((part) => part.getBoundingClientRect());
return {sizes: sizes(".drawn img, .panels svg").map((box) => [box.width, box.height]), inks: [before, ink()],
  natural: [...document.querySelectorAll(".drawn img")].map((each) => each.naturalWidth),
  tooWide: document.documentElement.scrollWidth - innerWidth};
"""


def figure(name="lines", **words) -> Figure:
    with drawing():
        canvas = new(5, 3)
        left, right = canvas.subplots(1, 2)
        left.plot([1, 2, 3], label="a line")
        left.set_xlabel("block")
        left.legend()
        right.imshow(np.eye(8))
    rows = [{"block": 1, "distance": 0.123456789, "head": "a"}, {"block": 2, "distance": 2.0, "head": "b"}]
    given = dict(title="Lines", caption="What they show.", findings=["They rise by 1."], protocol={"model": "none"})
    return Figure(name, rows=rows, canvas=canvas, **{**given, **words})


def test_a_figure_is_four_files_and_comes_back(tmp_path):
    files = figure().save(tmp_path)
    assert [file.name for file in files] == ["lines.png", "lines.svg", "lines.csv", "lines.json"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    with files[2].open() as file:
        assert next(csv.DictReader(file)) == {"block": "1", "distance": "0.123457", "head": "a"}
    kept = SavedFigure.read(files[3])
    assert (kept.title, kept.caption, kept.findings) == ("Lines", "What they show.", ["They rise by 1."])
    assert "a line" in kept.svg, "letters stay letters"
    assert INK not in kept.svg and "currentColor" in kept.svg
    ElementTree.fromstring(kept.svg)  # an image is XML, and is not shown if it has an error


def test_equal_numbers_make_equal_files(tmp_path):
    for folder in ("a", "b"):
        figure().save(tmp_path / folder)
    for kind in ("png", "svg", "csv", "json"):
        assert (tmp_path / "a" / f"lines.{kind}").read_bytes() == (tmp_path / "b" / f"lines.{kind}").read_bytes()


def test_a_damaged_figure_is_named(tmp_path):
    (tmp_path / "half.json").write_text('{"title": "x"')
    with pytest.raises(StateError, match=r"half\.json is not a figure of `acclimate analyze`"):
        SavedFigure.read(tmp_path / "half.json")


def test_an_edited_figure_is_refused(made, tmp_path, capsys):
    """Also one whose edit would pass it off as a figure of the model of the runs."""
    ours = Store(made / "runs").outcomes()[0].spec.model
    words, drawn = figure(origin={**ours, "weights": "0123"}).save(tmp_path)[3], tmp_path / "lines.svg"
    content, svg = json.loads(words.read_bytes()), drawn.read_bytes()
    edits = {key: json.dumps({**content, key: value}) for key, value in (
        ("origin", ours), ("title", "Others"), ("caption", ""), ("findings", ["They fall."]), ("protocol", {}),
        ("name", "first"), ("digest", "0" * 16),
    )}  # fmt: skip
    edits |= {f"without {key}": json.dumps({k: v for k, v in content.items() if k != key}) for key in content}
    command = ["report", str(made / "runs"), "-o", str(tmp_path / "page.html"), "--figures", str(tmp_path)]
    for edit, text in edits.items():
        words.write_text(text, encoding="utf-8")
        assert main(command) == 2, edit
        error = capsys.readouterr().err
        assert "lines.json" in error and "`acclimate analyze`" in error and error.count("\n") == 1, edit
    words.write_text(json.dumps(content), encoding="utf-8")
    draw = random.Random(0)
    for _ in range(50):
        place = draw.randrange(len(svg))
        drawn.write_bytes(bytes([*svg[:place], svg[place] ^ draw.randrange(1, 256), *svg[place + 1 :]]))
        with pytest.raises(StateError, match=r"lines\.json and its drawing are not what"):
            SavedFigure.read(words)
    drawn.write_bytes(svg)
    copies = [Path(shutil.copy(file, tmp_path / f"copy{file.suffix}")) for file in (words, drawn)]
    assert main(command) == 2 and "copy.json" in capsys.readouterr().err, "a figure has its own name"
    for copy in copies:
        copy.unlink()
    assert main(command) == 0 and "lines: left out, because it is of another model" in capsys.readouterr().out


def test_vital_signs_are_of_each_step_not_of_all_so_far():
    steps = [
        {"images": 4, "used": 4, "entropy": 1.0, "drift": 0.0},
        {"images": 8, "used": 1, "entropy": None, "drift": 0.5},
        {"images": 10, "used": 2, "entropy": 0.5, "drift": 0.7},
    ]
    entropy, share, drift = health(steps).values()
    assert (entropy, share, drift) == ([1.0, 1.0, 0.5], [1.0, 0.25, 1.0], [0.0, 0.5, 0.7])


@pytest.mark.parametrize("count", [1, 3, 100])
def test_a_course_ends_where_the_run_ends_and_keeps_its_mean(count):
    values = np.linspace(2, 4, count)
    course = resampled(values.tolist(), np.linspace(0, 1, 25))
    assert course.shape == (25,) and course.min() >= 2 and course.max() <= 4
    assert course[-1] == pytest.approx(values[-max(1, round(count / 25)) :].mean())
    assert np.all(np.diff(course) >= -1e-12)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small bench, two figures, and their report."""
    home = tmp_path_factory.mktemp("report")
    how = dict(corruptions=["fog", "snow"], images=24, batch_size=12)
    acclimate.bench(methods=["source", "tent"], out=home / "runs", **how)
    origin = Store(home / "runs").outcomes()[0].spec.model
    figure("first", origin=origin).save(home / "figures")
    figure("second", title="More <lines>", origin=origin).save(home / "figures")
    arguments = ["report", str(home / "runs"), "-o", str(home / "report.html"), "--figures", str(home / "figures")]
    assert main(arguments) == 0
    return home


def test_the_report_has_table_health_figures_and_protocol(made):
    text = (made / "report.html").read_text()
    for heading in ("Accuracy", "Along the stream", "Health", "Cost", "Lines", "More &lt;lines&gt;", "Protocol"):
        assert f"<h2>{heading}</h2>" in text
    assert text.count("What they show.") == 2 and "They rise by 1." in text
    assert "Share of the images learned from along the stream. At the end: source 0, tent 1." in text
    assert not re.search(r'(?:src|href)="(?!#|data:)', text), "nothing is fetched"
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_runs_without_their_steps_have_no_health(made):
    results = acclimate.bench(methods=["source"], corruptions=["fog"], images=24, out=None)
    assert "<h2>Health</h2>" not in page(results.grids()["normal"], title="t")


def test_what_is_missing_is_said(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(made / "runs"), "--figures", str(tmp_path / "none")]) == 2
    assert "acclimate analyze all --out" in capsys.readouterr().err
    assert main(["report", str(made / "runs")]) == 0
    assert "no figures, which `acclimate analyze all` would draw" in capsys.readouterr().out
    assert main(["report", str(made / "runs"), "--settings", "mixed"]) == 2
    assert "none of the 4 finished runs there is what was asked for" in capsys.readouterr().err


def test_figures_of_another_model_are_left_out_and_named(made, tmp_path, capsys):
    ours = Store(made / "runs").outcomes()[0].spec.model
    others = {**ours, "model": "vit", "weights": "0123"}
    for name, whose in {"same": ours, "other": others, "silent": {}}.items():
        figure(name, title=name, origin=whose).save(tmp_path)
    page = tmp_path / "page.html"
    assert main(["report", str(made / "runs"), "-o", str(page), "--figures", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "other: left out, because it is of another model (vit, weights 0123) than the runs (bundled" in out
    assert "silent: left out, because it is of another model" in out and "1 figures" in out
    text = page.read_text()
    assert "<h2>same</h2>" in text and "<h2>other</h2>" not in text


@needs_browser
def test_a_browser_shows_the_report(made):
    report, console = probe_page((made / "report.html").read_text(encoding="utf-8"), PROBE, made)
    assert not console
    assert len(report["sizes"]) == 2 + 3 + 2 and all(width > 100 and height > 50 for width, height in report["sizes"])
    assert report["natural"] == [480, 480], "as wide as it was drawn: 5 inches"
    assert report["inks"][0] != report["inks"][1], "the figures' ink follows the page's colours"
    assert report["tooWide"] <= 0


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'acclimate\[figures\]'"), drawing():
        pass
