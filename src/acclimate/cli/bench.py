"""`acclimate bench`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ._words import Commands, listed, method_list, numbers, words

if TYPE_CHECKING:
    from rich.console import Console

    from ..evaluation.results import Results

EPILOG = """\
examples:
  acclimate bench                                     source, tent, sar and dct under four corruptions
  acclimate bench --full --seeds 0,1,2                all 15 corruptions, mean and deviation over three orders
  acclimate bench --methods source,dct --setting continual+label-shift --corruptions fog,snow,frost

  acclimate bench --data imagenet-c --root /data/ImageNet-C --model vit_base_patch16_224.augreg_in21k_ft_in1k \\
      --setting normal,label-shift,bs1 --seeds 2021,2022,2023
  acclimate bench --data folder --root photos/ --corruptions fog,snow --severity 3 --model art.safetensors

  acclimate bench ... --jobs 4                        four processes on this machine
  acclimate bench ... --on ray                        tasks on a Ray cluster (RAY_ADDRESS), or on a local one
  acclimate bench ... --shard 3/10                    the third of ten parts, for any other scheduler

Interrupted, by Ctrl-C or kill -9, the same command goes on in mid-stream and ends with the same results to the last bit.
Finished runs are kept in --out and not run again; `acclimate table runs/` makes tables of them.
"""


def add(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="compare methods, on the bundled images or on yours",
        description="Compare methods under domain shift; without arguments on the bundled ViT and images (Fashion-MNIST), "
        "under corruptions unknown to it. Every method meets the same images in the same order.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = bench.add_argument_group("what")
    what.add_argument(
        "--methods", default="source,tent,sar,dct", metavar="LIST", help="default: %(default)s; with options: dct:lr=0.01"
    )
    what.add_argument(
        "--model", default="bundled", metavar="NAME", help="timm's name with its tag, or a file of train-source"
    )
    what.add_argument("--weights", metavar="FILE", help="local weights for a model of timm's, instead of a download")
    what.add_argument(
        "--source-statistics",
        metavar="FILES",
        help="for methods that need them: of source-statistics for eata and cfa, of train-prompts for dept-g",
    )
    what.add_argument("--data", default="bundled", metavar="NAME", help="`acclimate data list` shows them")
    what.add_argument("--root", metavar="DIR", help="where the data set is")
    what.add_argument("--corruptions", metavar="LIST", help="default: all 15; of the bundled images one of each family")
    what.add_argument("--full", action="store_true", help="all 15 corruptions of ImageNet-C on the bundled images")
    what.add_argument(
        "--severity",
        metavar="LIST",
        help="default: 5; of the bundled images 2, where the source model is right 6 times in 10",
    )
    what.add_argument("--domains", metavar="LIST", help="of Office-Home; default: all")
    what.add_argument(
        "--constants",
        metavar="WHOSE",
        help="how strong a severity made on the fly is: imagenet-c or cifar-10-c; default: by size, for the bundled images "
        "imagenet-c",
    )
    what.add_argument(
        "--images", type=int, metavar="N", help="of each domain; default: all, of the bundled ones 2000 (at most 8000)"
    )
    what.add_argument("--partial", action="store_true", help="take a data set that is not complete")

    how = bench.add_argument_group("how")
    how.add_argument(
        "--setting",
        default="normal",
        metavar="LIST",
        help="normal, bs1, label-shift, mixed, continual, gradual, or several joined by +; default: %(default)s",
    )
    how.add_argument("--seeds", default="0", metavar="LIST", help="orders of the stream; several give mean and deviation")
    how.add_argument("--batch-size", type=int, default=64, metavar="N", help="default: %(default)s")
    how.add_argument(
        "--order", metavar="FILE", help="index file (.npy) of a label-shift stream, as SAR's authors share theirs"
    )
    how.add_argument(
        "--defaults", action="store_true", help="the methods' own defaults, not the options tuned for the bundled model"
    )
    how.add_argument("--reference", action="store_true", help="every method as its authors' code, quirks included; no guard")
    how.add_argument("--predict", default="before", metavar="WHEN", help="before (as the papers' code) or after the update")
    how.add_argument("--no-guard", action="store_true", help="do not watch for collapse; the papers' code does not")
    how.add_argument("--precision", default="float32", metavar="TYPE", help="float32, bfloat16 or float16")

    where = bench.add_argument_group("where")
    where.add_argument("--device", metavar="NAME", help="default: a GPU if there is one")
    where.add_argument("--threads", type=int, metavar="N", help="of each process, on a CPU; decides how sums are rounded")
    where.add_argument("--workers", type=int, metavar="N", help="processes that load images ahead; default: up to 4")
    where.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time on this machine; default: %(default)s"
    )
    where.add_argument("--on", choices=["ray"], help="run on a Ray cluster (pip install 'acclimate[ray]')")
    where.add_argument("--gpus", type=float, metavar="N", help="of each run on Ray; default: 1 if there is one")
    where.add_argument("--shard", default="1/1", metavar="I/N", help="only the I-th of N parts of the grid")
    where.add_argument("--out", default="runs", metavar="DIR", help="where runs are kept; default: %(default)s")
    where.add_argument("--fresh", action="store_true", help="run again what was run before")
    bench.set_defaults(run=_bench)


def _bench(given: argparse.Namespace) -> None:
    from rich.console import Console

    from ..data import bundled
    from ..data.corruptions import CORRUPTIONS
    from ..errors import ConfigError
    from ..evaluation.bench import bench
    from ..evaluation.spec import Protocol

    if given.full and (given.corruptions is not None or given.data != "bundled"):
        raise ConfigError("--full is all corruptions of the bundled images: leave out --corruptions and --data.")
    shard = given.shard.split("/")
    if len(shard) != 2 or not all(part.isdigit() for part in shard):
        raise ConfigError(f"--shard {given.shard}: give two numbers, like 3/10.")
    console = Console()
    results = bench(
        given.model,
        given.data,
        given.root,
        methods=method_list(given.methods),
        settings=listed("setting", given.setting),
        seeds=numbers("seeds", given.seeds),
        corruptions=CORRUPTIONS if given.full else given.corruptions and listed("corruptions", given.corruptions),
        severities=given.severity and numbers("severity", given.severity),
        domains=given.domains and listed("domains", given.domains),
        images=given.images,
        batch_size=given.batch_size,
        order=given.order,
        partial=given.partial,
        constants=given.constants,
        tuned=not given.defaults,
        reference=given.reference,
        protocol=Protocol(given.predict, not (given.no_guard or given.reference), given.precision),
        source_statistics=words(given.source_statistics) or None,
        weights=given.weights,
        device=given.device,
        threads=given.threads,
        workers=given.workers,
        store=given.out,
        again=given.fresh,
        shard=(int(shard[0]), int(shard[1])),
        jobs=given.jobs,
        on=given.on,
        gpus=given.gpus,
        console=console if console.is_terminal else Console(stderr=True),
    )
    show(results, console)
    found = sum(outcome.found for outcome in results)
    earlier = f"; {found} of {len(results)} were found there (--fresh runs them again)" if found else ""
    if given.model == "bundled" and not given.reference:
        tuned = [] if given.defaults else [o.spec.method for o in results if o.spec.method in bundled.tuned()]
        whose = f"With options tuned on four other corruptions: {', '.join(dict.fromkeys(tuned))}. " if tuned else ""
        console.print(f"{whose}{'Others with' if tuned else 'With'} default options.")
    console.print(f"Results: {given.out}/{earlier}. Other tables of them: acclimate table {given.out} --help")


def show(results: Results, console: Console, *, mix: bool = False) -> None:
    """A table for each setting, with what there is to say about it."""
    from ..evaluation.tables import fingerprint, terminal

    for setting, grid in results.grids(mix=mix).items():
        samples = {outcome.result.samples for outcome in grid.outcomes}
        count = f"{min(samples)}" if len(samples) == 1 else f"{min(samples)} to {max(samples)}"
        console.print(terminal(grid, f"Top-1 in %: {setting}, {grid.severities}{count} images a stream, {grid.model}"))
        looks = fingerprint(grid)
        if looks is not None and looks.nearest is not None:
            console.print(f"Source {looks.verdict}.", style="dim")
        if looks is not None and looks.warning:
            console.print(f"Warning: {looks.warning}", style="bold yellow")
    for outcome in results:
        events = outcome.result.events if outcome.spec.method != "source" else []
        if events:
            (step, event), where = events[0], ", ".join(outcome.spec.domains[:2])
            console.print(
                f"{outcome.spec.method} on {where}: {len(events)} events, first at step {step}: {event}", style="yellow"
            )
