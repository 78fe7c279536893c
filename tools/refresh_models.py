"""Write the tables of docs/models.md: what the tiny model of each family has, and what each method needs.

    python tools/refresh_models.py

A test fails if the tables are not those that this tool writes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from compare_bundled import replace

from acclimate.core.registry import find_method, fitting_methods, list_methods
from acclimate.models.families import view_of
from acclimate.models.view import PARTS
from acclimate.testing.zoo import ZOO, tiny

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
NORMS = {"batch": "BatchNorm", "group": "GroupNorm", "layer": "LayerNorm"}
SOURCE, BATCH = "of the source", "of the batch"
STATISTICS = {"norm": "mixed", "memo": "mixed, 16 to 1", "rotta": "follow the memory"}


def families() -> str:
    """Return the table of families."""
    columns = ("family", "library", "for example", "norms", "linear head", "attention", "class token", "blocks", "methods")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, member in ZOO.items():
        seen = view_of(tiny(name))
        has = ("yes" if part in seen.parts else "no" for part in ("features", "attention", "class token", "blocks"))
        kind, count = NORMS[seen.kind_of_norm], f"{len(fitting_methods(seen))} of {len(list_methods())}"
        both = " and BatchNorm" if "batch norms" in seen.parts and kind != "BatchNorm" else ""
        example = f"`{member.example}`" if " " not in member.example else member.example
        rows.append(f"| {name} | {member.library} | {example} | {kind}{both} | {' | '.join(has)} | {count} |")
    return "\n".join(rows)


def methods() -> str:
    """Return the table of methods."""
    rows = ["| method | needs | statistics of BatchNorm |", "|---|---|---|"]
    for name in list_methods():
        info = find_method(name).info
        needs = "; ".join(PARTS[part] for part in info.requires) or "logits alone"
        statistics = STATISTICS.get(name, BATCH if info.batch_statistics else SOURCE)
        rows.append(f"| `{name}` | {needs} | {statistics} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE)
    page = parser.parse_args().page
    replace(page, "families", families())
    replace(page, "methods", methods())


if __name__ == "__main__":
    main()
