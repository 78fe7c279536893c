"""Choose each method's options for the bundled model, with the same effort for each, and write them into the package.

    python tools/tune_bundled.py

Only the four extra corruptions are used (speckle noise, gaussian blur, spatter, saturate), each at the severity at which the
source model comes nearest to the 50 to 75 % at which the bench reports; the 15 of ImageNet-C are for reporting. Every method
gets the same number of trials. Trial k draws every option from the same quasi-random point k, so that methods that share an
option try the same values of it; the first trial is the method's own defaults. The best mean accuracy over the whole stream
wins. Runs are kept in runs/tune: an interrupted search goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from scipy.stats import qmc

from acclimate.bench.store import Store
from acclimate.bench.sweep import sweep
from acclimate.data import bundled
from acclimate.data.datasets import Corrupted
from acclimate.data.streams import Stream

ENTROPY = math.log(len(bundled.CLASSES))  # of a uniform prediction
SPACE = {
    "lr": lambda u: rounded(10 ** (-4 + 3 * u)),
    "margin": lambda u: rounded((0.2 + 0.6 * u) * ENTROPY),  # SAR: 0.4
    "recovery": lambda u: 0.2 if u < 0.5 else rounded(0.2 / math.log(1000) * ENTROPY),  # SAR's 0.2 is of 1000 classes
    "lr_generator": lambda u: rounded(10 ** (-4 + 3 * u)),
    "init": lambda u: "default" if u < 0.5 else "zero",
}
SAR = ["lr", "margin", "recovery"]
TUNABLE = {"tent": ["lr"], "sar": SAR, "dct": [*SAR, "lr_generator", "init"]}
SEVERITY = {"speckle_noise": 5, "gaussian_blur": 2, "spatter": 5, "saturate": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12, help="for each method; default: %(default)s")
    parser.add_argument("--images", type=int, default=2000, help="for each corruption; default: %(default)s")
    parser.add_argument("--runs", type=Path, default=Path("runs/tune"))
    parser.add_argument("--out", type=Path, default=bundled.TUNED)
    options = parser.parse_args()

    console = Console()
    everything = bundled.images()
    images = everything.sample(options.images, skip=len(everything.labels) - bundled.FOR_TUNING)  # the bench shows others
    domains = [
        Corrupted(images, name, severity, mean=bundled.MEAN, std=bundled.STD, constants=bundled.CONSTANTS)
        for name, severity in SEVERITY.items()
    ]
    streams = [Stream(domain, seed=1) for domain in domains]
    points = qmc.Halton(len(SPACE), scramble=True, rng=0).random(options.trials - 1)
    model, store = bundled.model(), Store(options.runs)

    def score(method: str, chosen: dict[str, Any]) -> dict[str, float]:
        outcomes = sweep(model, streams, {method: chosen}, model_name="acclimate_bundled", store=store, console=console)
        return {outcome.spec.domains[0]: round(outcome.result.top1, 4) for outcome in outcomes}

    source = score("source", {})
    console.print(f"source {mean(source):.2%}")
    trials: dict[str, list[dict[str, Any]]] = {}
    for method, tunable in TUNABLE.items():
        drawn = [{name: draw(u) for (name, draw), u in zip(SPACE.items(), point) if name in tunable} for point in points]
        trials[method] = []
        for chosen in [{}, *drawn]:
            accuracy = score(method, chosen)
            trials[method].append({"options": chosen, "mean": round(mean(accuracy), 4), "accuracy": accuracy})
            console.print(f"{method} {mean(accuracy):.2%}  {chosen or 'defaults'}")
    best = {method: max(tried, key=lambda trial: trial["mean"]) for method, tried in trials.items()}
    outcome = {
        "how": "tools/tune_bundled.py: best mean accuracy on the four extra corruptions, as many trials for each method",
        "images": options.images,
        "constants": bundled.CONSTANTS,
        "trials_each": options.trials,
        "source": {"mean": round(mean(source), 4), "accuracy": source},
        "chosen": {method: trial["options"] for method, trial in best.items()},
        "chosen_mean": {method: trial["mean"] for method, trial in best.items()},
        "trials": trials,
    }
    options.out.write_text(json.dumps(outcome, indent=1) + "\n")
    console.print(f"written to {options.out}: {outcome['chosen']}")


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def mean(accuracy: dict[str, float]) -> float:
    return sum(accuracy.values()) / len(accuracy)


if __name__ == "__main__":
    main()
