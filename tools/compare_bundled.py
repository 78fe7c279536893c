"""Compare all methods on the bundled model, in five settings, and put the tables into docs/results.md.

    python tools/compare_bundled.py [--settings normal,bs1] [--methods source,dct] [--jobs 2 --threads 1]

All 15 corruptions at severity 5 with CIFAR-10-C's constants, which were made for small images; with them the source model
is right two times in three. Every method has the options that `tools/tune_bundled.py` found for it on other corruptions
and other images. All see the same images in the same order. There is no guard, so that the methods are compared alone. A
method that takes many passes for an image sees fewer images, and stands in a table of its own, beside Source on the same
ones. Runs are kept in runs/compare: an interrupted comparison goes on where it was. The text between the tables is
written by hand.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from rich.console import Console

import acclimate
from acclimate.core.registry import fitting_methods
from acclimate.data import bundled
from acclimate.data.corruptions import CORRUPTIONS
from acclimate.evaluation.formats import markdown
from acclimate.evaluation.grid import Execution
from acclimate.evaluation.spec import Protocol
from acclimate.evaluation.tables import Grid, Summary
from acclimate.models.families import view_of

IMAGES = {"normal": 256, "label-shift": 128, "bs1": 32, "mixed": 128, "continual": 128}  # of each corruption
COSTLY = {"memo": 10, "dda": 10}  # of each corruption so many, in the first setting alone
SINGLE: dict[str, dict[str, Any]] = {"roid": {"window": 16}, "cmf": {"window": 16}}  # options for single images
NEVER_SINGLE = {"actmad", "foa"}  # refuse them
ALREADY = {"keel", "neo"}  # recentre by themselves
PAGE = Path(__file__).parent.parent / "docs" / "results.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(IMAGES), help="default: %(default)s")
    parser.add_argument("--methods", help="separated by commas; default: all")
    parser.add_argument("--corruptions", default=",".join(CORRUPTIONS), help="default: all 15")
    parser.add_argument("--images", type=int, help="of each corruption, in every setting; default: by setting")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of each process; default: torch's")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"))
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/results.md")
    options = parser.parse_args()
    names = options.methods.split(",") if options.methods else fitting_methods(view_of(bundled.model()))
    how: dict[str, Any] = dict(
        corruptions=options.corruptions.split(","),
        severities=[5],
        constants="cifar-10-c",
        protocol=Protocol(guard=False),
        out=options.runs,
        execution=Execution(jobs=options.jobs, threads=options.threads),
        console=Console(stderr=True),
    )
    grids: dict[str, Grid] = {}
    for setting in options.settings.split(","):
        left_out = {*COSTLY, *(NEVER_SINGLE if setting == "bs1" else ())}
        plain = [(name, SINGLE.get(name, {}) if setting == "bs1" else {}) for name in names if name not in left_out]
        methods = []
        for name, chosen in plain:
            methods += [(name, chosen)] + [(name, {**chosen, "recentre": True})] * (name not in ALREADY)
        count = options.images or IMAGES[setting]
        results = acclimate.bench(methods=methods, settings=setting, images=count, **how)
        grids |= results.grids()
        replace(options.page, setting, table(grids[setting], count))
    replace(options.page, "means", means(grids))
    for name in (name for name in COSTLY if name in names):
        count = min(COSTLY[name], options.images or COSTLY[name])
        results = acclimate.bench(methods=["source", name], settings="normal", images=count, **how)
        replace(options.page, name, table(results.grids()["normal"], count))


def table(grid: Grid, count: int) -> str:
    shared = grid.outcomes[0].spec.shared
    lines = "\n".join(f"- {key}: {value}" for key, value in shared.items() if value)
    card = f"<details><summary>Protocol</summary>\n\n- images of each corruption: {count}\n{lines}\n\n</details>"
    return f"{markdown(grid)}\n\n{card}"


def means(grids: dict[str, Grid]) -> str:
    """The mean over the corruptions, by method and setting."""
    lines = ["| method | " + " | ".join(grids) + " |", "|---" * (1 + len(grids)) + "|"]
    first = next(iter(grids.values()))
    for row in first.rows:
        cells, label = [], first.label(row)
        for grid in grids.values():
            mine = next((other for other in grid.rows if grid.label(other) == label), None)
            text = "-" if mine is None else grid.text(mine, Summary.MEAN)
            cells.append(f"**{text}**" if mine is not None and grid.best(mine, Summary.MEAN) else text)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replace(page: Path, name: str, content: str) -> None:
    """Put a table between its marks, at the end of the page if there are none."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    text = page.read_text() if page.exists() else ""
    if begin not in text:
        text += f"\n## {name}\n\n{begin}\n{end}\n"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
    page.write_text(pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text))


if __name__ == "__main__":
    main()
