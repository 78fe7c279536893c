"""The reference pages, made from the package itself.

Each page is a function that returns Markdown, so that tests can read it without Sphinx. When Sphinx starts, `setup` writes
all pages into `reference/`. Nothing is rewritten that has not changed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import acclimate
from acclimate.cli import build_parser
from acclimate.cli._parser import Parser
from acclimate.cli.methods import describe
from acclimate.core import statefile
from acclimate.core.registry import create_method, find_method
from acclimate.data.catalog import data_sets
from acclimate.data.layouts import LAYOUTS
from acclimate.evaluation import store
from acclimate.models.view import PARTS
from acclimate.testing.check import tiny_batches, tiny_model
from acclimate.testing.replay import CHECKED, Recording

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
GOLDEN = DOCS.parent / "tests" / "golden"
NOTE = "% Made by docs/_ext/acclimate_docs.py.\n\n"

# The modules of the API reference: those that users, methods and the pages of this site import.
MODULES = {
    "The adapter": ["core.adapter", "core.options", "core.state", "core.guard", "core.recentre", "core.ranks"],
    "The method contract": ["core.method", "core.engine", "core.parameters", "core.registry", "core.statistics"],
    "Models": [
        "models.view", "models.families", "models.surgery", "models.loading", "models.normalisation", "models.zero_shot",
    ],
    "Data": [
        "data.corruptions", "data.domains", "data.streams", "data.dataset", "data.catalog", "data.layouts", "data.disk",
        "data.preprocess", "data.hostile", "data.bundled",
    ],
    "Evaluation": [
        "evaluation.testbed", "evaluation.run", "evaluation.spec", "evaluation.grid", "evaluation.store",
        "evaluation.journal", "evaluation.results", "evaluation.tables", "evaluation.paired", "evaluation.harm",
        "evaluation.predictions",
    ],
    "Testing": ["testing.check", "testing.replay", "testing.zoo"],
    "Errors": ["errors"],
}  # fmt: skip


def table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(re.sub(r"\s+", " ", str(cell)).replace("|", "\\|") for cell in cells) + " |\n"

    headings = list(headings)
    return line(headings) + line("---" for _ in headings) + "".join(map(line, rows)) + "\n"


# Methods


class Docstring(NamedTuple):
    """The parts of a docstring in Google style."""

    text: str
    arguments: dict[str, str]


def read_docstring(cls: type) -> Docstring:
    """Return the text of a class's docstring without its section of arguments, and that section by name."""
    before, _, after = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:\n")
    listed, rest = re.fullmatch(r"((?:[ ]+.*\n?|\n)*)(.*)", after, re.S).groups()  # type: ignore[union-attr]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", listed, re.M)
    return Docstring(f"{before.strip()}\n\n{rest.strip()}".strip(), dict(found))


@cache
def recordings() -> dict[str, list[tuple[str, Recording]]]:
    """Return the committed recordings with their file names, by the method that they check."""
    found: dict[str, list[tuple[str, Recording]]] = {}
    for file in sorted(GOLDEN.glob("*.safetensors")):
        recording = Recording(file)
        if recording.method in CHECKED:
            found.setdefault(CHECKED[recording.method], []).append((file.name, recording))
    return found


class Measured(NamedTuple):
    """A table of docs/results.md."""

    mark: str
    rows: dict[str, dict[str, str]]
    protocol: str


@cache
def measured(mark: str) -> Measured | None:
    """Return the table of docs/results.md between two marks, with its protocol, or None if there is none."""
    found = re.search(f"<!-- {mark} -->\n(.*?)<!-- end of {mark} -->", (DOCS / "results.md").read_text(), re.S)
    if found is None:
        return None
    lines = [line.strip("| ").split(" | ") for line in found[1].splitlines() if line.startswith("|")]
    rows = {line[0]: dict(zip(lines[0], line)) for line in lines[2:]}
    return Measured(mark, rows, "\n".join(re.findall("^- .*", found[1], re.M)))


def table_of(name: str) -> Measured | None:
    """Return the table that has a method: the one of all methods, or one of its own. None if it was not measured."""
    return next((found for found in map(measured, ("normal", name)) if found and name in found.rows), None)


def accuracy(name: str) -> str:
    """Return the accuracy that was measured on the bundled model, with its protocol."""
    found = table_of(name)
    if found is None:
        return "No accuracy of this method on the bundled model is in [the results](../../results.md).\n"
    shown = [row for row in ("source", name, f"{name}(recentre=order)") if row in found.rows]
    columns = ["mean", *(column for column in found.rows[name] if column in ("second half", "2nd half", "over source"))]
    rows = [[f"`{row}`", *(found.rows[row][column] for column in columns)] for row in dict.fromkeys(shown)]
    return (
        f"Top-1 accuracy in % on the bundled model, mean over corruptions at severity 5, as in the table `{found.mark}` of\n"
        "[the results](../../results.md), which has each corruption, and says which options were tuned. "
        "± is a 95 % interval, paired by image.\n\n"
        f"{table(['', *columns], rows)}"
        f"The protocol of these numbers:\n\n{found.protocol}\n"
    )


def fidelity(name: str) -> str:
    """Return which recordings check a method."""
    kinds = [recorded for recorded, method in CHECKED.items() if method == name]
    if not kinds:
        return "No recorded run of other code checks this method.\n"
    text = (
        f"With `reference=True` the method repeats recorded runs of a reference implementation ({', '.join(kinds)})\n"
        "step by step: logits, what it learned from, and the adapted tensors. `acclimate replay FILE` compares.\n\n"
    )
    rows = [(f"`{file}`", recording.source) for file, recording in recordings().get(name, [])]
    if not rows:
        return text + "None of these recordings is in the repository.\n"
    return text + table(("recording in `tests/golden`", "what ran"), rows)


def method_page(name: str) -> str:
    """Return the page of a method."""
    cls = find_method(name)
    info = create_method(name, {}).info
    docstring = read_docstring(cls)
    facts = describe(name)
    single = {"yes": "can be adapted to", "no": f"cannot be adapted to: {info.exceptions.get('batch_of_one', '')}"}
    normalises = "of each batch" if info.batch_statistics else "of the source data"
    rows = {
        "Adapts": info.adapts,
        "Remembers": info.remembers,
        "A model must have": ", ".join(PARTS[part] for part in info.requires) or "logits, and nothing else",
        "Needs beyond the batch": facts["beyond the batch"],
        "Cost": f"at most {info.passes[0]} forward and {info.passes[1]} backward passes of each image",
        "Streams of single images": single.get(facts["one image"], f"can be adapted to {facts['one image']}"),
        "Statistics of BatchNorm": "what it adapts" if "batch norms" in info.requires else normalises,
        "Logits come from": "after the update" if info.predicts_after else "before the update",
        '`reply="first"` replies': "after the first forward pass" if info.replies_first else "at the end of the step",
        "Recentring": f"on by default (`{info.recentre!r}`)" if info.recentre else "off by default",
    }
    options = [
        (f"`{option}`", f"`{p.annotation}`", f"`{p.default!r}`", docstring.arguments[option])
        for option, p in cls.options().items()
    ]
    return (
        f"# {name}\n\n"
        f'```python\nmodel = acclimate.adapt(model, "{name}")\n```\n\n'
        f"{docstring.text}\n\n"
        f"{table(('Paper', info.paper), rows.items())}"
        f"## Options\n\n{table(('option', 'type', 'default', 'meaning'), options)}"
        f"## Fidelity\n\n{fidelity(name)}\n"
        f"## Measured accuracy\n\n{accuracy(name)}"
    )


def methods_page() -> str:
    """Return the overview of all methods."""
    names = acclimate.list_methods()
    rows = []
    for name in names:
        found = table_of(name)
        row = found.rows[name] if found and found.mark == "normal" else {}
        numbers = (row.get("mean", "-"), row.get("over source", "-"))
        replayed = "yes" if name in CHECKED.values() else "no"
        *facts, paper = describe(name).values()
        rows.append((f"[{name}]({name}.md)", *facts, replayed, *numbers, paper))
    normal = measured("normal")
    assert normal is not None, "docs/results.md has the table"
    headings = ("method", *list(describe("source"))[:-1], "recordings", "mean", "over source", "paper")
    return (
        "# Methods\n\n"
        "These methods are registered.\n\n"
        "- *Beyond the batch*: what needs source statistics or trained prompts is not source-free.\n"
        "- *One image*: whether a stream of single images can be adapted to.\n"
        "- *Passes*: forward + backward, of each image, at most.\n"
        "- *Recordings*: whether recorded runs of a reference implementation check the method step by step.\n"
        "- *Mean* and *over source*: top-1 accuracy in % on the bundled model, and its difference from `source` in points,\n"
        "  from the table `normal` of [the results](../../results.md), without recentring unless that is its default.\n\n"
        f"{table(headings, rows)}"
        f"The protocol of the accuracies:\n\n{normal.protocol}\n\n"
        "```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"
    )


# The command line


def commands(parser: Parser) -> Iterator[tuple[Parser, str]]:
    """Yield the parsers of the commands of a parser, and of their own, each with its help in one line."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                command = action.choices[choice.dest].completed()
                yield command, choice.help or ""
                yield from commands(command)


def arguments_of(parser: Parser) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the title of each group of arguments, with the form and the help of each argument."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)):
                continue
            form = ", ".join(f"`{option}`" for option in action.option_strings)
            value = "" if action.nargs == 0 else formatter._metavar_formatter(action, action.dest.upper())(1)[0]
            required = "; required" if action.required and action.option_strings else ""
            text = formatter._expand_help(action) if action.help else ""
            rows.append((f"{form} `{value}`".strip() if value else form, text + required))
        if rows:
            yield group.title or "", rows


def commands_page() -> str:
    """Return the page of the command line."""
    page = "# Command line\n\nMade from the parsers: `acclimate COMMAND --help` prints the same.\n\n"
    for parser, short in commands(build_parser()):
        level = "#" * len(parser.prog.split())
        page += f"{level} {parser.prog.removeprefix('acclimate ')}\n\n{sentence(parser.description or short)}\n\n"
        for title, rows in arguments_of(parser):
            page += f"*{title}*\n\n{table(('argument', 'meaning'), rows)}"
        if parser.epilog and level == "##":
            page += f"```text\n{parser.epilog.strip()}\n```\n\n"
    return page


def sentence(text: str) -> str:
    """Return a text that starts with a capital letter and ends with a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


# Data sets and files


def data_sets_page() -> str:
    """Return the page of the data sets."""
    rows = []
    for name, entry in data_sets().items():
        layout = LAYOUTS.get(name)
        number = "" if layout is None or not layout.total else f"{next(iter(layout.total.values())):,}"
        rows.append((f"`{name}`", entry.about, f"`{entry.shape}`", number, entry.origin))
    return (
        "# Data sets\n\n"
        "The names that `--data` and `data=` take, and what has to be below `--root`. Layouts are those in which the data\n"
        "sets are distributed. `acclimate data check` says what is missing, and where to get it.\n\n"
        f"{table(('name', 'what', 'below its root', 'images of a domain', 'from'), rows)}"
        "How images are resized, and in which order classes are counted, is in [the guide of the bench](../bench.md#data).\n"
    )


def files_page() -> str:
    """Return the page of the file formats, with the header of a state file that is written here."""
    adapter = acclimate.adapt(tiny_model(), "tent")
    for images in tiny_batches(2):
        adapter(images)
    with tempfile.TemporaryDirectory() as folder:
        adapter.save(Path(folder) / "state.safetensors")
        tensors, header = statefile.read(Path(folder) / "state.safetensors")
    kinds: dict[str, list[str]] = {}
    for name in tensors:
        kinds.setdefault(name.partition("/")[0], []).append(name)
    rows = [(f"`{kind}`", len(names), f"`{names[0]}`") for kind, names in sorted(kinds.items())]
    return (
        "# File formats\n\n"
        f"## State file\n\n{inspect.cleandoc(statefile.__doc__ or '')}\n\n"
        "The metadata of the safetensors file has two entries: `acclimate`, the header as JSON, and `digest`. This is the\n"
        "header of a tiny model after two steps of TENT, as `acclimate inspect FILE` shows it:\n\n"
        f"```json\n{json.dumps(header, indent=2)}\n```\n\n"
        "Its tensors, by the first part of their names:\n\n"
        f"{table(('first part', 'tensors', 'for example'), rows)}"
        f"## Results folder\n\n{inspect.cleandoc(store.__doc__ or '')}\n"
    )


# The API


def api_pages() -> dict[str, str]:
    """Return the pages of the API: the public names, and one page for each module."""
    home = {name: f"acclimate.{module}" for name, module in acclimate._HOME.items()}
    public = "\n".join(
        f".. auto{'class' if inspect.isclass(getattr(acclimate, name)) else 'function'}:: acclimate.{name}\n"
        + ("   :members:\n" if inspect.isclass(getattr(acclimate, name)) else "")
        for name in home
    )
    modules = ", ".join(
        f"`{name}` is [acclimate.{module}](acclimate.{module}.md)" for name, module in acclimate._MODULES.items()
    )
    pages = {"api/acclimate": f"# acclimate\n\nThe public names. {modules}.\n\n```{{eval-rst}}\n{public}```\n"}
    for module in (f"acclimate.{name}" for names in MODULES.values() for name in names):
        elsewhere = ", ".join(name for name, where in home.items() if where == module)
        exclude = f"   :exclude-members: {elsewhere}\n" if elsewhere else ""
        note = f"{elsewhere.replace(', ', ' and ')}: see [acclimate](acclimate.md).\n\n" if elsewhere else ""
        about = inspect.cleandoc(import_module(module).__doc__ or "")
        pages[f"api/{module}"] = (
            f"# {module}\n\n{about}\n\n{note}```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n"
            f"   :show-inheritance:\n{exclude}```\n"
        )
    index = "# API\n\nFrom the docstrings.\n\n```{toctree}\n:maxdepth: 1\n\nacclimate\n```\n\n"
    for title, names in MODULES.items():
        index += (
            f"## {title}\n\n```{{toctree}}\n:maxdepth: 1\n\n"
            + "\n".join(f"{n} <acclimate.{n}>" for n in names)
            + "\n```\n\n"
        )
    return {"api/index": index, **pages}


# All pages


def pages() -> dict[str, str]:
    """Return all generated pages, by their names below `reference/`, without ending."""
    return {
        **api_pages(),
        "commands": commands_page(),
        "data-sets": data_sets_page(),
        "files": files_page(),
        "methods/index": methods_page(),
        **{f"methods/{name}": method_page(name) for name in acclimate.list_methods()},
    }


def write_pages(folder: Path) -> None:
    """Write all pages whose content has changed, and remove those of methods and modules that are gone."""
    wanted = {folder / f"{name}.md": NOTE + text for name, text in pages().items()}
    for file, text in wanted.items():
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    for file in folder.rglob("*.md"):
        if file not in wanted:
            file.unlink()


def without_text_of_modules(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Leave out the docstrings of modules, which their pages have as Markdown already."""
    if what == "module":
        lines.clear()


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages before Sphinx looks for sources."""
    app.connect("autodoc-process-docstring", without_text_of_modules)
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "reference"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
