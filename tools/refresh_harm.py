"""Measure the harm of adaptation on hostile streams, and put the tables into docs/harm.md.

    python tools/refresh_harm.py [--methods tent,keel] [--rates own,tuned] [--images 1024] [--table harm]
        [--assets DIR] [--jobs 2 --threads 1]

The bundled model, or with --assets the model and the photographs of try_imagenet_tiny.py, meets clean images, fog and frost
of severity 5 (the bundled images with CIFAR-10-C's constants). Runs are kept in runs/harm: an interrupted table goes on
where it was. The text around the tables is written by hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from compare_bundled import replace
from rich.console import Console
from try_imagenet_tiny import photographed

from acclimate.data.catalog import Selection
from acclimate.evaluation.grid import Execution
from acclimate.evaluation.harm import CORRUPTIONS, IMAGES, METHODS, RATES, measure_harm
from acclimate.evaluation.store import Store
from acclimate.evaluation.testbed import open_testbed
from acclimate.report.harm import harm_markdown

PAGE = Path(__file__).parent.parent / "docs" / "harm.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS), help="default: %(default)s")
    parser.add_argument("--rates", default=",".join(RATES), help="default: %(default)s")
    parser.add_argument("--images", type=int, default=IMAGES, help="of each domain; default: %(default)s")
    parser.add_argument("--assets", type=Path, help="folder of the photographs and their model; default: bundled")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of each process; default: torch's")
    parser.add_argument("--runs", type=Path, default=Path("runs/harm"))
    parser.add_argument("--table", default="harm", help="name of the marks on the page; default: %(default)s")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/harm.md")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    bundled = Selection(CORRUPTIONS, [5], images=options.images, constants="cifar-10-c")
    cells = measure_harm(
        photographed(options.assets, CORRUPTIONS, 5, options.images) if options.assets else open_testbed(selection=bundled),
        options.methods.split(","),
        rates=options.rates.split(","),
        execution=Execution(jobs=options.jobs, threads=options.threads),
        store=Store(options.runs),
        console=Console(stderr=True),
    )
    replace(options.page, options.table, harm_markdown(cells))


if __name__ == "__main__":
    main()
