"""`acclimate bench`."""

from __future__ import annotations

import argparse

from ._words import Commands, listed

EPILOG = """\
examples:
  acclimate bench                                     source, tent, sar and dct under four corruptions
  acclimate bench --full --seeds 0,1,2                all 15 corruptions, mean and deviation over three orders
  acclimate bench --methods source,dct --setting continual+label-shift --corruptions fog,snow,frost
"""


def add(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="compare methods on the bundled model and images",
        description="Compare methods on the bundled ViT and images (Fashion-MNIST) under corruptions unknown to it. "
        "Every method meets the same images in the same order. Finished runs are kept and not run again.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("--methods", default="source,tent,sar,dct", metavar="LIST", help="default: %(default)s")
    bench.add_argument(
        "--corruptions", metavar="LIST", help="names; default: one of each family (noise, blur, weather, digital)"
    )
    bench.add_argument("--full", action="store_true", help="all 15 corruptions of ImageNet-C")
    bench.add_argument(
        "--severity", type=int, metavar="1..5", help="default: 2, where the source model is right about 6 times in 10"
    )
    bench.add_argument(
        "--constants",
        metavar="WHOSE",
        help="how strong a severity is: imagenet-c, the default, or cifar-10-c, which hardly harms these pictures",
    )
    bench.add_argument(
        "--setting", default="normal", help="normal, bs1, label-shift, mixed, continual, gradual, or several joined by +"
    )
    bench.add_argument(
        "--images",
        type=int,
        default=2000,
        metavar="N",
        help="of the 8000 test images that were not used for tuning; default: %(default)s",
    )
    bench.add_argument("--batch-size", type=int, default=64, metavar="N", help="default: %(default)s")
    bench.add_argument("--seeds", default="0", metavar="LIST", help="orders of the stream; several give mean and deviation")
    bench.add_argument(
        "--defaults", action="store_true", help="the methods' own defaults, not the options tuned for this model"
    )
    bench.add_argument("--out", default="runs", metavar="DIR", help="where results are kept; default: %(default)s")
    bench.add_argument("--fresh", action="store_true", help="run again what was run before")
    bench.set_defaults(run=_bench)


def _bench(given: argparse.Namespace) -> None:
    from rich.console import Console

    from ..bench.store import Store
    from ..bench.sweep import sweep
    from ..bench.tables import terminal
    from ..data import bundled
    from ..data.corruptions import CORRUPTIONS
    from ..data.datasets import Corrupted
    from ..data.streams import ARRANGEMENTS, Stream
    from ..errors import ConfigError

    everything = bundled.images()
    most = len(everything.labels) - bundled.FOR_TUNING
    if given.images > most:
        raise ConfigError(f"--images {given.images}: at most {most}; the options were tuned on the others.")
    if given.full and given.corruptions is not None:
        raise ConfigError("--full is all corruptions: leave out --corruptions.")
    names = CORRUPTIONS if given.full else bundled.SHOWN
    if given.corruptions is not None:
        names = tuple(listed("corruptions", given.corruptions))
    constants = bundled.CONSTANTS if given.constants is None else given.constants
    severities = [bundled.SEVERITY if given.severity is None else given.severity]
    if "gradual" in given.setting:
        if given.severity is not None:
            raise ConfigError("--severity does not go with the setting gradual, which has all five.")
        severities = [1, 2, 3, 4, 5]
    try:
        seeds = [int(seed) for seed in listed("seeds", given.seeds)]
    except ValueError:
        raise ConfigError(f"--seeds {given.seeds}: give whole numbers, separated by commas.") from None
    tuned = {} if given.defaults else bundled.tuned()
    methods = {method: tuned.get(method, {}) for method in listed("methods", given.methods)}

    images = everything.sample(given.images)
    domains = [
        Corrupted(images, n, s, mean=bundled.MEAN, std=bundled.STD, constants=constants) for n in names for s in severities
    ]
    together = any(arrangement in given.setting for arrangement in ARRANGEMENTS)
    streams = [
        Stream(group, given.setting, batch_size=given.batch_size, seed=seed)
        for seed in seeds
        for group in ([domains] if together else [[domain] for domain in domains])
    ]
    console = Console()
    outcomes = sweep(
        bundled.model(),
        streams,
        methods,
        model_name="acclimate_bundled",
        store=Store(given.out),
        again=given.fresh,
        console=console,
    )
    severity = "severities 1 to 5" if len(severities) > 1 else f"severity {severities[0]}"
    options = "default options" if given.defaults else "options tuned on four other corruptions"
    console.print(
        terminal(
            outcomes,
            f"Top-1 in %: {given.images} images, {severity} of {constants}, {given.setting}, seeds {given.seeds}",
        )
    )
    for outcome in outcomes:
        events = outcome.result.events if outcome.spec.method != "source" else []
        if events:
            (step, event), where = events[0], ", ".join(outcome.spec.domains[:2])
            console.print(
                f"{outcome.spec.method} on {where}: {len(events)} events, first at step {step}: {event}", style="yellow"
            )
    found = sum(outcome.found for outcome in outcomes)
    earlier = f"; {found} of {len(outcomes)} were found there (--fresh runs them again)" if found else ""
    console.print(f"With {options}. Results: {given.out}/{earlier}.")
