"""Figures as files, and the report: results, health and figures on one page that a browser shows."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import acclimate
from acclimate.analysis.figures import INK, Figure, SavedFigure, drawing, new
from acclimate.cli import main
from acclimate.errors import ConfigError, StateError
from acclimate.evaluation.store import Store
from acclimate.report.page import page
from acclimate.report.progress import health, resampled

pytest.importorskip("matplotlib")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PROBE = """<script>
const drawn = [...document.querySelectorAll(".drawn svg, .panels svg")].map((svg) => svg.getBoundingClientRect());
const bitmaps = [...document.querySelectorAll(".drawn image")].map((image) => image.getBoundingClientRect().width);
const ink = () => getComputedStyle(document.querySelector(".drawn svg text")).fill;
const before = ink();
document.getElementById("theme").click();
const report = {sizes: drawn.map((box) => [box.width, box.height]), bitmaps, inks: [before, ink()],
  tooWide: document.documentElement.scrollWidth - innerWidth};
document.body.append(Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(report)}));
</script></body>"""


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
    assert kept.svg.startswith("<svg") and "a line" in kept.svg, "letters stay letters"
    assert INK not in kept.svg and "currentColor" in kept.svg and "<style" not in kept.svg
    names = re.findall(r'\bid="([^"]+)"', kept.svg)
    assert names and all(name.startswith("lines-") for name in names)
    assert set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', kept.svg)) <= set(names)


def test_equal_numbers_make_equal_files(tmp_path):
    for folder in ("a", "b"):
        figure().save(tmp_path / folder)
    for kind in ("png", "svg", "csv", "json"):
        assert (tmp_path / "a" / f"lines.{kind}").read_bytes() == (tmp_path / "b" / f"lines.{kind}").read_bytes()


def test_a_damaged_figure_is_named(tmp_path):
    (tmp_path / "half.json").write_text('{"title": "x"')
    with pytest.raises(StateError, match=r"half\.json is not a figure of `acclimate analyze`"):
        SavedFigure.read(tmp_path / "half.json")


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


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_the_report(made):
    file = made / "probed.html"
    file.write_text((made / "report.html").read_text().replace("</body>", PROBE))
    quiet = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --enable-logging=stderr"
    options = [*quiet.split(), "--window-size=500,900", f"--user-data-dir={made}/home", "--dump-dom", file.as_uri()]
    shown = subprocess.run([BROWSER, *options], capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in shown.stderr, [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="seen">(.*?)</pre>', shown.stdout)
    assert found
    report = json.loads(found[1])
    assert len(report["sizes"]) == 2 + 3 + 2 and all(width > 100 and height > 50 for width, height in report["sizes"])
    assert len(report["bitmaps"]) == 2 and min(report["bitmaps"]) > 20
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
