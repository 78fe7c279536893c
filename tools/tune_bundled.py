"""Choose each method's options for the bundled model, with the same effort for each, and write them into the package.

    python tools/tune_bundled.py [--methods tent,sar] [--jobs 2 --threads 1]

Only the four extra corruptions are used (speckle noise, gaussian blur, spatter, saturate), each at the severity at which the
source model comes nearest to the 50 to 75 % at which the bench reports; the 15 of ImageNet-C are for reporting. Every method
gets the same number of trials. Trial k draws every option from the same quasi-random point k, so that methods that share an
option try the same values of it; the first trial is the method's own defaults. The best mean accuracy over the whole stream
wins. The methods that take many passes for an image see fewer images (`COSTLY`). Runs are kept in runs/tune: an interrupted
search goes on where it was, and methods that are not named keep what was found for them before.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from scipy.stats import qmc

from acclimate.data import bundled
from acclimate.data.domains import Corrupted, Domain, Subset
from acclimate.data.streams import Stream
from acclimate.evaluation.grid import Execution, run_grid
from acclimate.evaluation.store import Store
from acclimate.evaluation.testbed import open_testbed

ENTROPY = math.log(len(bundled.CLASSES))  # of a uniform prediction
SPACE: dict[str, Callable[[float], Any]] = {
    "lr": lambda u: rounded(10 ** (-4 + 3 * u)),
    "margin": lambda u: rounded((0.2 + 0.6 * u) * ENTROPY),  # SAR: 0.4
    "recovery": lambda u: 0.2 if u < 0.5 else rounded(0.2 / math.log(1000) * ENTROPY),  # SAR's 0.2 is of 1000 classes
    "lr_generator": lambda u: rounded(10 ** (-4 + 3 * u)),
    "init": lambda u: "default" if u < 0.5 else "zero",
    "lr_predictor": lambda u: rounded(10 ** (-3 + 3 * u)),
    "supports_per_class": lambda u: (1, 5, 20, 50, 100)[int(5 * u)],  # the grid of T3A's authors
    "affinity": lambda u: ("rbf", "knn")[int(2 * u)],
    "neighbours": lambda u: 1 + int(5 * u),
    "fisher_weight": lambda u: rounded(10 ** (1 + 3 * u)),
    "lr, of Adam": lambda u: rounded(10 ** (-5 + 3 * u)),  # whose steps are as long as this, whatever the gradient
    "lr, of prompts": lambda u: rounded(10 ** (-3 + 4 * u)),
    "sigma": lambda u: rounded(10 ** (-1.5 + 2 * u)),
    "discrepancy": lambda u: rounded(10 ** (-1.5 + 2 * u)),
    "tau": lambda u: rounded(10 ** (-2 + 2 * u)),  # above 0.3 the regions of most images contain other classes
}
SAR = ["lr", "margin", "recovery"]
TUNABLE = {
    "tent": ["lr"],
    "sar": SAR,
    "dct": [*SAR, "lr_generator", "init"],
    "t3a": ["supports_per_class"],
    "cotta": ["lr"],
    "memo": ["lr, of Adam"],
    "adacontrast": ["lr"],
    "cfa": ["lr"],
    "eta": ["lr", "margin"],
    "eata": ["lr", "margin", "fisher_weight"],
    "deyo": ["lr", "margin"],
    "delta": ["lr"],
    "roid": ["lr"],
    "cmf": ["lr"],
    "lame": ["affinity", "neighbours"],
    "rotta": ["lr, of Adam"],
    "rdumb": ["lr", "margin"],
    "spa": ["lr", "lr_predictor"],
    "zerosiam": ["lr", "lr_predictor"],
    "vpt": ["lr, of prompts", "margin", "recovery"],
    "foa": ["sigma", "discrepancy"],
    "dept-g": ["lr"],
    "poem": ["lr", "margin"],
    "rem": ["lr, of Adam"],
    "recap": ["lr", "tau", "recovery"],
    "moetta": ["lr"],
    "actmad": ["lr"],
}
COSTLY = {"memo": 20, "foa": 200, "dept-g": 200}  # images of each corruption
CONSTANTS = "imagenet-c"
SEVERITY = {"speckle_noise": 5, "gaussian_blur": 2, "spatter": 5, "saturate": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12, help="for each method; default: %(default)s")
    parser.add_argument("--images", type=int, default=500, help="of each corruption; default: %(default)s")
    parser.add_argument("--methods", default=",".join(TUNABLE), help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of each process; default: torch's")
    parser.add_argument("--runs", type=Path, default=Path("runs/tune"))
    parser.add_argument("--out", type=Path, default=bundled.TUNED)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    console = Console()
    everything = bundled.images()
    points = qmc.Halton(len(SPACE), scramble=True, rng=0).random(options.trials - 1)
    store = Store(options.runs)

    def score(method: str, trials: list[dict[str, Any]], count: int) -> list[dict[str, float]]:
        """Accuracy by corruption, for each trial."""
        skip = len(everything.labels) - bundled.FOR_TUNING  # the bench shows others
        shown = [
            Corrupted(everything, name, severity, mean=bundled.MEAN, std=bundled.STD, constants=CONSTANTS)
            for name, severity in SEVERITY.items()
        ]
        domains: list[Domain] = [Subset.sample(domain, count, skip=skip) for domain in shown]
        testbed = open_testbed(data=domains, tuned=False, model_name="acclimate_bundled", device="cpu")
        distinct = {json.dumps(trial): trial for trial in trials}
        outcomes = run_grid(
            testbed,
            [Stream(domain, seed=1) for domain in domains],
            [(method, trial) for trial in distinct.values()],
            store=store,
            execution=Execution(jobs=options.jobs),
            console=console,
        )
        found = {  # one stream after another, and on each all trials
            key: {str(outcome.spec.domains[0]): round(outcome.result.top1, 4) for outcome in outcomes[i :: len(distinct)]}
            for i, key in enumerate(distinct)
        }
        return [found[json.dumps(trial)] for trial in trials]

    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    trials: dict[str, list[dict[str, Any]]] = kept.get("trials", {})
    images: dict[str, int] = kept.get("images", {})
    for method in options.methods.split(","):
        images[method] = min(options.images, COSTLY.get(method, options.images))
        tried = [{}, *(drawn(point, TUNABLE[method]) for point in points)]
        trials[method] = [
            {"options": chosen, "mean": round(mean(accuracy), 4), "accuracy": accuracy}
            for chosen, accuracy in zip(tried, score(method, tried, images[method]))
        ]
        for trial in trials[method]:
            console.print(f"{method} {trial['mean']:.2%}  {trial['options'] or 'defaults'}")
    source = {count: score("source", [{}], count)[0] for count in sorted(set(images.values()))}
    best = {method: max(trials[method], key=lambda trial: trial["mean"]) for method in TUNABLE if method in trials}
    outcome = {
        "how": "tools/tune_bundled.py: best mean accuracy on the four extra corruptions, as many trials for each method",
        "images": images,
        "constants": CONSTANTS,
        "trials_each": options.trials,
        "source": {count: {"mean": round(mean(accuracy), 4), "accuracy": accuracy} for count, accuracy in source.items()},
        "chosen": {method: trial["options"] for method, trial in best.items()},
        "chosen_mean": {method: trial["mean"] for method, trial in best.items()},
        "trials": {method: trials[method] for method in best},
    }
    options.out.write_text(json.dumps(outcome, indent=1) + "\n")
    console.print(f"written to {options.out}: {outcome['chosen']}")


def drawn(point: Sequence[float], tunable: Sequence[str]) -> dict[str, Any]:
    """The options of a method at a quasi-random point."""
    return {name.partition(",")[0]: draw(u) for (name, draw), u in zip(SPACE.items(), point) if name in tunable}


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def mean(accuracy: dict[str, float]) -> float:
    return sum(accuracy.values()) / len(accuracy)


if __name__ == "__main__":
    main()
