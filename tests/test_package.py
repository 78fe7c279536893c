"""The package as a whole: light to import, few public names, a command line that explains itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import acclimate
from acclimate import cli
from acclimate.core import registry
from acclimate.testing import check
from acclimate.testing.check import tiny_model

ROOT = Path(__file__).parents[1]


def modules_after(code):
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], check=True, capture_output=True, text=True
    )
    return set(out.stdout.split("\n")[-2].split())


def test_importing_does_not_import_torch():
    loaded = modules_after("import acclimate, acclimate.cli; dir(acclimate)")
    assert not loaded & {"torch", "timm", "torchvision", "transformers", "rich"}


def test_help_does_not_import_torch():
    loaded = modules_after("from acclimate.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert "torch" not in loaded


def test_wrapping_a_timm_model_does_not_import_transformers():
    loaded = modules_after(
        "import acclimate; from acclimate.testing.check import tiny_model; acclimate.adapt(tiny_model(), 'dct')"
    )
    assert "transformers" not in loaded


@pytest.mark.parametrize("first", ["eta", "dct"])
def test_any_method_may_be_imported_first(first):
    """As when it comes out of a pickle; the order of the list does not depend on it."""
    code = f"import acclimate.methods.{first}, acclimate; print('names', *acclimate.list_methods())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split()[1:] == acclimate.list_methods()


def test_every_public_name_exists():
    for name in acclimate.__all__:
        assert getattr(acclimate, name) is not None
    assert len(acclimate.__all__) <= 15
    assert not hasattr(acclimate, "no_such_name")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_methods_command(capsys):
    assert cli.main(["methods"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name}\b", out, re.M) for name in acclimate.list_methods())
    assert cli.main(["methods", "dct"]) == 0
    out = capsys.readouterr().out
    assert "lr_generator=None" in out and "domain conditioners" in out


@pytest.mark.parametrize("name", acclimate.list_methods())
def test_every_option_is_documented(name):
    cls = registry.find_method(name)
    for option in cls.options():
        assert re.search(rf"^ +{option}: ", cls.__doc__, re.M), f"{name}: {option}"


def test_an_unknown_method_is_an_error_message(capsys):
    assert cli.main(["methods", "tnet"]) == 2
    assert "Did you mean 'tent'?" in capsys.readouterr().err


def test_inspect_command(tmp_path, capsys, batches):
    model = acclimate.adapt(tiny_model(), "sar")
    model(batches[0])
    model.save(tmp_path / "s.safetensors")
    assert cli.main(["inspect", str(tmp_path / "s.safetensors")]) == 0
    assert '"method": "sar"' in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "gone")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_check_command_on_a_file(tmp_path, capsys, monkeypatch):
    timm = {"timm": check.families()["timm"]}
    monkeypatch.setattr(check, "families", lambda: timm)  # test_check.py checks the others
    file = tmp_path / "mine.py"
    file.write_text(
        "import acclimate\n"
        "@acclimate.register('mine-from-a-file')\n"
        "class Mine(acclimate.Method):\n"
        "    def step(self, images, engine):\n"
        "        return acclimate.Step(engine.predict(images))\n"
    )
    try:
        assert cli.main(["check", str(file)]) == 0
        assert "mine-from-a-file  timm: batch_of_one: passed" in capsys.readouterr().out
    finally:
        registry._REGISTRY.pop("mine-from-a-file", None)
        registry._FILES.pop(file.resolve(), None)
    file.write_text("import acclimate\n")
    assert cli.main(["check", str(file)]) == 2
    assert "registers no method" in capsys.readouterr().err
