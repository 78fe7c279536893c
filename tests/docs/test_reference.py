"""The generated reference pages: nothing that the package has is missing in them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import acclimate
from acclimate import cli, errors
from acclimate.core import registry
from acclimate.data.catalog import data_sets
from acclimate.testing.replay import CHECKED, REPLAYS

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import acclimate_docs  # noqa: E402


@pytest.fixture(scope="module")
def pages():
    return acclimate_docs.pages()


@pytest.mark.parametrize("name", acclimate.list_methods())
def test_a_method_has_a_page_with_its_options(name, pages):
    page = pages[f"methods/{name}"]
    cls = registry.find_method(name)
    for option, parameter in cls.options().items():
        assert re.search(rf"^\| `{option}` \|.*\| `{re.escape(repr(parameter.default))}` \| \S", page, re.M), option
    assert cls.info.paper in page
    assert f"\n{name}\n" in pages["methods/index"] and f"[{name}]({name}.md)" in pages["methods/index"]
    assert "Args:" not in page and "## Measured accuracy" in page


@pytest.mark.parametrize("name", [name for name in acclimate.list_methods() if name != "source"])
def test_a_method_has_equations(name):
    text = acclimate_docs.read_docstring(registry.find_method(name)).text
    assert re.search(r"^    .*( = |<-)", text, re.M), "indented lines with what the method computes"


def test_a_page_names_the_recordings_that_check_its_method(pages):
    assert "`dct_bs1.safetensors`" in pages["methods/dct"] and "yushuntang/DCT" in pages["methods/dct"]
    assert "COME-TENT" in pages["methods/tent"] and "`tent_normal.safetensors`" in pages["methods/tent"]
    assert "No recorded run" in pages["methods/keel"]
    assert {*CHECKED} <= {*REPLAYS} and {*CHECKED.values()} <= {*acclimate.list_methods()}


def test_accuracies_are_those_of_the_results(pages):
    results = (DOCS / "results.md").read_text()
    row = next(line for line in results.splitlines() if line.startswith("| keel |")).split(" | ")
    shown = re.search(r"^\| `keel` \| (.*) \|$", pages["methods/keel"], re.M)[1]
    assert shown.split(" | ")[0] == row[-3] and shown.split(" | ")[-1] == row[-1].strip(" |")
    assert "- stream: normal" in pages["methods/keel"], "a number has its protocol"
    assert "table `memo`" in pages["methods/memo"]
    assert acclimate_docs.table_of("no such method") is None
    assert "No accuracy" in acclimate_docs.accuracy("no such method")


def test_every_command_and_argument_is_in_the_page_of_the_command_line(pages):
    parser = cli.build_parser()
    found = {command.prog: command for command, _ in acclimate_docs.commands(parser)}
    assert len(found) > 20 and {"acclimate bench", "acclimate data check", "acclimate analyze tsne"} <= found.keys()
    for prog, command in found.items():
        section = re.search(rf"^##+ {prog.removeprefix('acclimate ')}\n(.*?)(?=^##|\Z)", pages["commands"], re.M | re.S)[1]
        for option in command._option_string_actions:
            assert f"`{option}" in section or option in ("-h", "--help"), (prog, option)


def test_data_sets_errors_and_public_names_are_there(pages):
    assert all(f"| `{name}` |" in pages["data-sets"] for name in data_sets())
    assert all(f":: acclimate.{name}\n" in pages["api/acclimate"] for name in acclimate._HOME)
    assert "acclimate.errors" in pages["api/index"] and "automodule:: acclimate.errors" in pages["api/acclimate.errors"]
    assert errors.AcclimateError.__doc__


def test_what_the_documentation_imports_is_in_the_reference(pages):
    for page in (DOCS.parent / "README.md", *DOCS.rglob("*.md")):
        for module in re.findall(r"^from (acclimate\.\S+) import", page.read_text(), re.M):
            assert f"api/{module}" in pages, f"{page.name} imports {module}"


def test_the_page_of_files_shows_a_real_header(pages):
    assert '"method": "tent"' in pages["files"] and "`result.json`" in pages["files"]


def test_pages_that_are_gone_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(acclimate_docs, "pages", lambda: {"methods/new": "# new\n"})
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "old.md").write_text("# old\n")
    acclimate_docs.write_pages(tmp_path)
    (written,) = tmp_path.rglob("*.md")
    assert written.read_text().endswith("# new\n")
    before = written.stat().st_mtime_ns
    acclimate_docs.write_pages(tmp_path)
    assert written.stat().st_mtime_ns == before, "what has not changed is not written"
