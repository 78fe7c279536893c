"""Put the output of `acclimate bench` into docs/bench.md, and draw the README's picture with `acclimate analyze stream`.

    python tools/refresh_readme.py

Takes six minutes on two idle cores. Runs are kept in runs/readme: interrupted, it goes on where it was, and what is finished
is not run again. The output stands between two marks of the page, the picture is docs/stream.png.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from compare_bundled import replace
from PIL import Image

from acclimate.cli import main as acclimate

ROOT = Path(__file__).parent.parent
WIDTH = 80  # of the terminal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="of each domain, to try it; default: those of the commands")
    parser.add_argument("--runs", type=Path, default=Path("runs/readme"))
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "bench.md")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "stream.png")
    options = parser.parse_args()
    few = ["--images", options.images] if options.images else []
    os.environ["COLUMNS"] = str(WIDTH)
    with redirect_stdout(io.StringIO()) as shown:
        code = acclimate(["bench", *few, "--out", str(options.runs)])
    if code == 0:
        code = acclimate(["analyze", "stream", *few, "--out", str(options.runs / "figures")])
    if code:
        sys.exit(code)
    table = shown.getvalue().partition("Results: ")[0]  # what follows depends on the folder
    lines = "\n".join(line.rstrip() for line in table.splitlines())
    replace(options.page, "output of the bench", f"```text\n{lines}\n```")
    with Image.open(options.runs / "figures" / "stream.png") as picture:
        picture.convert("RGB").quantize(64).save(options.picture, optimize=True)  # a third of the size


if __name__ == "__main__":
    main()
