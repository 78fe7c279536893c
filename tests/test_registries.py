"""Adding something touches one file: a method, a family of models, a data set, a figure, a command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import acclimate
from acclimate import cli
from acclimate.core import registry
from acclimate.data import layouts
from acclimate.data.catalog import data_sets, open_data
from acclimate.data.preprocess import Preprocess
from acclimate.errors import ConfigError
from acclimate.testing.check import tiny_batches, tiny_model

METHOD = """
import acclimate


@acclimate.register("mine-in-a-file")
class Mine(acclimate.Method):
    def __init__(self, *, sharpness: float = 1.0):
        super().__init__()
        self.sharpness = sharpness

    def step(self, images, engine):
        return acclimate.Step(self.sharpness * engine.predict(images))
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the package, to which files can be added."""
    source = Path(acclimate.__file__).parent
    shutil.copytree(source, tmp_path / "src" / "acclimate", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "src" / "acclimate"


def python(package: Path, code: str) -> str:
    """Run code with the copy of the package."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package.parent)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=package.parent.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def method_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(METHOD)
    yield file
    registry._REGISTRY.pop("mine-in-a-file", None)
    registry._FILES.pop(file.resolve(), None)


# Methods


def test_a_method_is_one_file(package):
    (package / "methods" / "mine.py").write_text(METHOD.replace("mine-in-a-file", "mine-in-the-package"))
    out = python(package, "import acclimate; print(acclimate.__file__, acclimate.list_methods())")
    assert str(package) in out and "mine-in-the-package" in out


def test_a_method_in_a_file_is_found_by_name_and_by_file(method_file):
    assert registry.find_method(str(method_file)).name == "mine-in-a-file" == registry.find_method("mine-in-a-file").name
    model = acclimate.adapt(tiny_model(), str(method_file), sharpness=2.0)
    images = tiny_batches(1)[0]
    torch.testing.assert_close(model(images), 2 * acclimate.adapt(tiny_model(), "source")(images))


def test_a_bench_table_and_report_know_a_method_in_a_file(method_file, tmp_path, capsys):
    """The tables are made in a process that has never read the file."""
    given = ["--corruptions", "fog", "--images", "64", "--out", str(tmp_path / "runs")]
    assert cli.main(["bench", "--methods", f"source,{method_file}:sharpness=3.0", *given]) == 0
    assert "mine-in-a-file" in capsys.readouterr().out
    commands = ["table", "runs", "--format", "csv"], ["report", "runs", "--out", "page.html"]
    code = f"from acclimate.cli import main; print(*(main(command) for command in {commands!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.endswith("0 0\n") and "mine-in-a-file" in done.stdout, done.stderr
    assert "mine-in-a-file" in (tmp_path / "page.html").read_text()


def test_a_changed_file_is_another_run(method_file, tmp_path):
    how = dict(corruptions=["fog"], images=32, out=tmp_path / "runs")
    (first,) = acclimate.bench(methods=[str(method_file)], **how)
    (again,) = acclimate.bench(methods=[str(method_file)], **how)
    assert again.found and again.spec.id == first.spec.id
    method_file.write_text(METHOD.replace("self.sharpness * engine", "-self.sharpness * engine"))
    (other,) = acclimate.bench(methods=[str(method_file)], **how)
    assert not other.found and other.spec.id != first.spec.id
    assert other.result.predictions != first.result.predictions, "the new code is what runs"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("x = (", "SyntaxError"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("", "no method"),
    ],
)
def test_a_file_without_a_method_is_an_error_that_says_why(content, message, tmp_path, capsys):
    file = tmp_path / "broken.py"
    if content is not None:
        file.write_text(content)
    known = acclimate.list_methods()
    with pytest.raises(ConfigError, match=message):
        registry.read_file(file)
    for command in (["check", str(file)], ["bench", "--methods", str(file)], ["methods", str(file)]):
        assert cli.main(command) == 2
        assert message in capsys.readouterr().err
    assert acclimate.list_methods() == known


def test_a_method_of_another_package_is_found_as_an_entry_point(package, tmp_path):
    """A package is installed once its folder and its metadata are on the path."""
    (package.parent / "other_package.py").write_text(METHOD.replace("mine-in-a-file", "mine-elsewhere"))
    info = package.parent / "other_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[acclimate.methods]\nmine-elsewhere = other_package:Mine\n")
    out = python(package, "import acclimate; print(acclimate.list_methods(), acclimate.adapt)")
    assert "mine-elsewhere" in out


# Families, data sets, commands, figures


def test_a_family_is_one_file(package):
    timm = (package / "models" / "families" / "timm.py").read_text()
    (package / "models" / "families" / "other.py").write_text(
        timm.replace('Family("timm", "timm"', 'Family("other", "timm"')
    )
    code = "from acclimate.models.families import families; from acclimate.testing.check import tiny_model; "
    assert "other" in python(package, code + "print(list(families()), type(tiny_model('other')))")


def test_a_data_set_is_one_entry(tmp_path, monkeypatch):
    from PIL import Image

    entry = layouts.Layout("two colours", "<class>/*", "this test", {"colours": (".",)})
    monkeypatch.setitem(layouts.LAYOUTS, "colours", entry)
    for colour in ("red", "blue"):
        (tmp_path / colour).mkdir()
        Image.new("RGB", (8, 8), colour).save(tmp_path / colour / "1.png")
    data = open_data("colours", tmp_path, Preprocess(None, None, (0.5,) * 3, (0.5,) * 3))
    assert (
        "colours" in data_sets() and list(data.class_names) == ["blue", "red"] and data.domains[0].labels.tolist() == [0, 1]
    )


def test_a_command_is_one_file(package):
    (package / "cli" / "hello.py").write_text(
        "POSITION = 1\n\n\ndef add(commands):\n    hello = commands.add_parser('hello', help='say hello')\n"
        "    hello.set_defaults(run=lambda given: print('hello there'))\n"
    )
    assert "hello there" in python(package, "from acclimate.cli import main; main(['hello'])")
    assert "say hello" in python(package, "from acclimate.cli import build_parser; print(build_parser().format_help())")


def test_a_figure_is_one_file(package):
    (package / "analysis" / "bars.py").write_text(
        "from .figures import Figure, drawing, new\nfrom .registry import SEED, FigureKind\n\n\n"
        "def draw(subject, *, seed, **more):\n"
        "    with drawing():\n        canvas = new(2, 2)\n        canvas.subplots().bar([0, 1], [1, 2])\n"
        "    return [Figure('bars', 'Bars', 'Two bars.', [{'x': 0}], canvas, origin=subject.origin)]\n\n\n"
        "FIGURE = FigureKind('bars', 'two bars', 5, draw, draws=('bars',), arguments=(SEED,))\n"
    )
    code = (
        "from acclimate.cli import main; from acclimate.analysis.registry import figure_order\n"
        "print(main(['analyze', 'bars', '--images', '4', '--out', 'figures']), figure_order()[0])"
    )
    out = python(package, code)
    assert "Bars" in out and out.splitlines()[-1] == "0 bars"
    assert {file.suffix for file in (package.parent.parent / "figures").iterdir()} == {".png", ".svg", ".csv", ".json"}
