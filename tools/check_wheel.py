"""Build the package, check what is in it, and try the wheel outside of the checkout.

    python tools/check_wheel.py

`build` makes the sdist, and the wheel from the sdist; `twine` checks both. The wheel must hold the files of src/acclimate
that git knows, its metadata and nothing else. It is installed in a new venv, which sees the dependencies of the Python that
runs this tool and not the checkout. There `acclimate bench` runs. Takes a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LARGEST = 10_000_000  # bytes of the wheel; docs/measurements.md states its size
BENCH = ("bench", "--methods", "source,keel", "--corruptions", "clean,fog", "--images", "16", "--out", "runs")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that may not see the checkout's sources, and return what it prints."""
    print("+", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{done.stdout}\nThis command failed with exit code {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def check_contents(wheel: Path) -> None:
    """Compare the names in the wheel with the files of the package that git knows."""
    known = {name.removeprefix("src/") for name in run("git", "ls-files", "src/acclimate", cwd=ROOT).split()}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    if held != known:
        sys.exit(f"The wheel lacks {sorted(known - held)}, and should not hold {sorted(held - known)}.")
    size = wheel.stat().st_size
    print(f"{wheel.name}: {len(held)} files, {size / 1e6:.1f} MB")
    if size > LARGEST:
        sys.exit(f"The wheel is larger than {LARGEST / 1e6:.0f} MB.")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run(sys.executable, "-m", "build", "--outdir", work / "dist", ROOT, cwd=work)
        print(run(sys.executable, "-m", "twine", "check", "--strict", *(work / "dist").iterdir(), cwd=work), end="")
        (wheel,) = (work / "dist").glob("*.whl")
        check_contents(wheel)

        run(sys.executable, "-m", "venv", work / "venv", cwd=work)
        python = work / "venv" / "bin" / "python"
        packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=work).strip())
        # the path files of that folder are not read, so that an editable install there stays out of sight
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", wheel, cwd=work)
        imported = Path(run(python, "-c", "import acclimate; print(acclimate.__file__)", cwd=work).strip())
        if not imported.is_relative_to(packages):
            sys.exit(f"This venv imports {imported}, which is not from the wheel.")
        acclimate = python.with_name("acclimate")
        run(acclimate, "bench", "--help", cwd=work)
        print(run(acclimate, *BENCH, cwd=work))
        if len(list((work / "runs").glob("*/result.json"))) != 4:
            sys.exit("The bench did not leave four results.")


if __name__ == "__main__":
    main()
