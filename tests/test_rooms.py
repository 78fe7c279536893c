"""The rooms of the package: each knows only those above it."""

from __future__ import annotations

import ast
from pathlib import Path

import acclimate

SOURCE = Path(acclimate.__file__).parent
# From the top down. `core` and `models` know each other: core passes models through their view.
ROOMS = [
    "errors", "core models", "data", "training", "methods", "evaluation", "report", "papers", "analysis", "serve", "testing",
    "cli",
]  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms.split()}
EXCEPTIONS = {("models/loading.py", "data")}  # the entry of the bundled model, imported when it is asked for


def imported(file: Path) -> set[str]:
    """Return the rooms that a file imports, at its top or inside of a function; imports for type checkers do not count."""
    package = ["acclimate", *file.relative_to(SOURCE).parts[:-1]]
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            modules = [[*base, node.module]] if node.module else [[*base, alias.name] for alias in node.names]
            found |= {".".join(module).split(".")[1] for module in modules if len(".".join(module).split(".")) > 1}
    return found


def test_a_room_knows_only_the_rooms_above_it():
    wrong = []
    for file in sorted(SOURCE.rglob("*.py")):
        where = file.relative_to(SOURCE)
        room = where.parts[0].removesuffix(".py")
        if room.startswith("__"):
            continue
        for other in imported(file) & LEVEL.keys():
            if LEVEL[other] > LEVEL[room] and (str(where), other) not in EXCEPTIONS:
                wrong.append(f"{where} imports {other}")
    assert not wrong, wrong


def test_every_room_is_in_the_list():
    rooms = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if not path.name.startswith(("_", "py.typed"))}
    assert rooms == LEVEL.keys()


def test_tests_live_in_the_rooms_of_what_they_test():
    tests = Path(__file__).parent
    rooms = {path.name for path in tests.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    assert rooms <= {*LEVEL, "docs", "tools"}
    assert {path.name for path in tests.glob("test_*.py")} == {"test_package.py", "test_registries.py", "test_rooms.py"}
