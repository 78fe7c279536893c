"""The code of the pages: Python blocks run, commands are understood, and links lead somewhere.

The Python blocks of a page run one after another in one namespace, which begins with the names of `ASSUMED`. A block is
left out if a comment stands before it: `<!-- not run: REASON -->`. Of commands, the options are checked, and those of
`CHEAP` run. docs/README.md explains this to those who write pages.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
import torch

import acclimate
from acclimate import cli
from acclimate.cli import _parser
from acclimate.core import registry
from acclimate.testing.check import tiny_batches, tiny_model

ROOT = Path(__file__).parents[2]
PAGES = [page for page in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))) if "reference" not in page.parts]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# What a page may use without making it, as a reader would have it.
ASSUMED = {
    "acclimate": lambda: acclimate,
    "camera": tiny_batches,
    "images": lambda: tiny_batches(1)[0],
    **dict.fromkeys(("model", "my_model", "fresh_model"), tiny_model),
}
# What has to hold for the names of a page when its blocks have run.
PROMISES = {
    "README.md": lambda names: torch.equal(names["source"].head.weight, tiny_model().head.weight),
    "docs/bench.md": lambda names: [outcome.spec.method for outcome in names["results"]] == ["source", "dct", "dct"],
    "docs/data.md": lambda names: names["result"].samples == names["stream"].samples == 2 * 10 * 51,
    "docs/usage.md": lambda names: torch.equal(names["source"].head.weight, tiny_model().head.weight),
}
CHEAP = ("methods", "data list")
FILES = {_parser.input_file, _parser.input_folder, _parser.output_file, _parser.output_folder}


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    code: str
    line: int
    skipped: bool


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text()
    for found in re.finditer(r"(<!-- not run: \S.* -->\n+)?^```(\w+)[^\n]*\n(.*?)^```$", text, re.M | re.S):
        yield Block(found[2], found[3], text.count("\n", 0, found.start(3)), bool(found[1]))


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python" and not block.skipped]


@pytest.mark.parametrize("page", [name for name, page in zip(NAMES, PAGES) if python_blocks(page)])
def test_python_blocks_run(page, tmp_path, monkeypatch):
    create = timm.create_model
    local = lambda name, pretrained=False, **options: tiny_model() if pretrained else create(name, **options)  # noqa: E731
    monkeypatch.setattr(timm, "create_model", local)  # nothing is downloaded
    monkeypatch.setattr(registry, "_REGISTRY", {name: registry.find_method(name) for name in acclimate.list_methods()})
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    names = {name: make() for name, make in ASSUMED.items()}
    for block in python_blocks(ROOT / page):
        exec(compile("\n" * block.line + block.code, page, "exec"), names)
    assert page not in PROMISES or PROMISES[page](names)


# Commands


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in the console blocks of a page."""
    for block in blocks(page):
        if block.language in ("console", "bash"):
            code = re.sub(r"\$\{?\w+\}?", "1", block.code.replace("\\\n", " "))  # a variable may be a number
            shown = re.findall(r"^\$ (.*)", code, re.M) if block.language == "console" else code.splitlines()
            for line in shown:
                lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
                lexer.whitespace_split = True
                words: list[str] = []
                for word in [*lexer, ";"]:
                    if word.strip("&|;"):
                        words.append(word)
                    elif words:
                        yield words
                        words = []


def without_files(parser: _parser.Parser) -> None:
    """Let a parser and those of its commands take files and folders that do not exist."""
    for action in parser.completed()._actions:
        if action.type in FILES:
            action.type = str
        elif action.type is _parser.input_files:
            action.type = _parser.words
        for choice in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            without_files(choice)


@pytest.fixture(scope="module")
def parser():
    found = cli.build_parser()
    without_files(found)
    return found


def unknown_options(parser: _parser.Parser, words: list[str]) -> set[str]:
    """Return the options of a command, which may be shortened, that its parser does not have."""
    known = {"--help", "--version"}
    for word in words:
        choices = next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})
        if word not in choices:
            break
        parser = choices[word]
        known |= {*parser._option_string_actions}
    return {word.partition("=")[0] for word in words if word.startswith("--")} - known


@pytest.mark.parametrize("page", [name for name, page in zip(NAMES, PAGES) if list(command_lines(page))])
def test_commands_are_understood(page, parser):
    for words in command_lines(ROOT / page):
        if Path(words[0]).name == "acclimate":
            assert not unknown_options(parser, words[1:]), words
            if "..." not in words:
                parser.parse_args(words[1:])
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words


@pytest.mark.parametrize("page", NAMES)
def test_options_that_a_page_names_exist(page, parser):
    """In the commands within its lines."""
    for command in re.findall(r"`acclimate ([^`]*)`", (ROOT / page).read_text()):
        assert not unknown_options(parser, command.split()), command


def cheap_commands() -> list[str]:
    words = {" ".join(words[1:]) for page in PAGES for words in command_lines(page) if words[0] == "acclimate"}
    return sorted(command for command in words if command.startswith(CHEAP) or command == "paper")


@pytest.mark.parametrize("command", cheap_commands())
def test_cheap_commands_run(command):
    assert cli.main(command.split()) == 0


# Links, which the build of the site checks inside of docs/


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [name for name in NAMES if "/" not in name])
def test_links_outside_of_the_site_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = ROOT / (path or page)
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
