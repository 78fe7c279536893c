"""The command `acclimate bench`."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from ._arguments import (
    Commands,
    add_data,
    add_device,
    add_model,
    add_selection,
    add_workers,
    methods,
    new_command,
    selection,
)
from ._parser import MOST_PROCESSES, TINY, input_file, input_files, list_of, number, output_folder, seed, shown, whole, words

if TYPE_CHECKING:
    from rich.console import Console

POSITION = 10
EPILOG = """\
examples:
  acclimate bench                                     source, tent, dct without and with recentring, and keel: clean images,
                                                      and every second corruption of ImageNet-C
  acclimate bench --full --seeds 0,1,2                all 15 corruptions, mean and deviation over three orders
  acclimate bench --methods source,dct --settings continual+label-shift --corruptions fog,snow,frost
  acclimate bench --methods source,mine.py            a method of your own, in a file that registers it

  acclimate bench --data imagenet-c --root /data/ImageNet-C --model vit_base_patch16_224.augreg_in21k_ft_in1k \\
      --settings normal,label-shift,bs1 --seeds 2021,2022,2023
  acclimate bench --data folder --root photos/ --model vit_tiny_patch16_224.augreg_in21k_ft_in1k
                                                      the same as without arguments, on your photographs: <class>/*.jpg
  acclimate bench --data folder --root photos/ --corruptions clean,fog,snow --severities 3 --model art.safetensors
  acclimate bench --data folder --root photos/ --labels labels.csv --model NAME
                                                      photographs in one folder, with their classes in a table
  acclimate bench --data folder --root street/ --domains day,night --settings continual --model NAME
                                                      domains of your own: street/day/<class>/*.jpg, street/night/...
  acclimate bench --data folder --root photos-c/ --model NAME
                                                      what `acclimate corrupt photos/ photos-c/` wrote

  acclimate bench --harm --methods tent,keel          does adaptation harm on hostile streams? without and with the guard

  acclimate bench ... --jobs 4                        four processes on this machine
  acclimate bench ... --on ray                        tasks on a Ray cluster (RAY_ADDRESS), or on a local one
  acclimate bench ... --shard 3/10                    the third of ten parts, for any other scheduler

After Ctrl-C or kill -9, the same command continues in the middle of the stream. The results are the same to the last bit.
Finished runs are kept in --out and are not repeated. `acclimate table runs/` makes tables of them.
"""
RULE = "The shifts are every second of the 15 corruptions of ImageNet-C, in their usual order; --full runs all of them."
NEXT = """\
What to try next:
  acclimate bench --full                                      all 15 corruptions
  acclimate bench --settings label-shift,continual            classes one after another; shifts one after another
  acclimate bench --data folder --root photos/ --model NAME   your photographs, with a model of timm's"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    bench = new_command(
        commands,
        "bench",
        help="compare methods, on the bundled images or on yours",
        description="Compare methods under domain shift; without arguments on the bundled ViT and images (Fashion-MNIST), "
        "under corruptions unknown to it. Every method meets the same images in the same order.",
        epilog=EPILOG,
    )
    what = bench.add_argument_group("what")
    what.add_argument(
        "--methods",
        type=words,
        metavar="LIST",
        help="default: source,tent,dct,dct:recentre=True,keel; options as here; from a file: mine.py",
    )
    add_model(what)
    what.add_argument(
        "--source-statistics",
        type=input_files,
        metavar="FILES",
        help="for methods that need them: of train-prompts for dept-g, and of source-statistics for the others",
    )
    add_data(what)
    add_selection(what)
    what.add_argument("--full", action="store_true", help="all 15 corruptions of ImageNet-C, on the bundled images too")

    how = bench.add_argument_group("how")
    how.add_argument(
        "--settings",
        type=words,
        default="normal",
        metavar="LIST",
        help="normal, bs1, label-shift, mixed, continual, gradual, or several joined by +; default: %(default)s",
    )
    how.add_argument(
        "--seeds",
        type=list_of(seed),
        default="0",
        metavar="LIST",
        help="orders of the stream; several give mean and deviation",
    )
    how.add_argument("--batch-size", type=whole(1), default=64, metavar="N", help="default: %(default)s")
    how.add_argument(
        "--order",
        type=input_file,
        metavar="FILE",
        help="index file (.npy) of a label-shift stream, as SAR's authors share theirs",
    )
    how.add_argument(
        "--tuned",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take options that were tuned for the model, which the bundled one has, or the methods' own defaults",
    )
    how.add_argument("--reference", action="store_true", help="every method as its authors' code, quirks included; no guard")
    how.add_argument(
        "--predict",
        default="before",
        choices=["before", "after"],
        metavar="WHEN",
        help="before (as the papers' code) or after the update",
    )
    how.add_argument(
        "--guard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with the unadapted model and undo harm, or not, as the papers' code",
    )
    how.add_argument(
        "--harm",
        action="store_true",
        help="measure the harm on hostile streams, without and with the guard, at several rates of learning",
    )
    how.add_argument(
        "--precision",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        metavar="TYPE",
        help="float32, bfloat16 or float16",
    )

    how.add_argument(
        "--realtime",
        type=number(TINY),
        metavar="RATE",
        help="let RATE images arrive each second: a late method skips updates or loses images. Nothing is stored",
    )

    where = bench.add_argument_group("where")
    add_device(where)
    where.add_argument(
        "--threads",
        type=whole(1, MOST_PROCESSES),
        metavar="N",
        help="threads of each process on a CPU; they decide how sums are rounded",
    )
    add_workers(where)
    where.add_argument(
        "--jobs",
        type=whole(1, MOST_PROCESSES),
        default=1,
        metavar="N",
        help="runs at a time on this machine; default: %(default)s",
    )
    where.add_argument("--on", choices=["ray"], help="run on a Ray cluster (pip install 'acclimate[ray]')")
    where.add_argument(
        "--gpus", type=number(0, MOST_PROCESSES), metavar="N", help="GPUs of each run on Ray; default: 1 if there is one"
    )
    where.add_argument("--shard", type=_shard, default="1/1", metavar="I/N", help="only the I-th of N parts of the grid")
    where.add_argument(
        "--out", type=output_folder, default="runs", metavar="DIR", help="where runs are kept; default: %(default)s"
    )
    where.add_argument("--fresh", action="store_true", help="repeat runs that are stored already")
    bench.set_defaults(run=_bench)


def _shard(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if numbers is None:
        raise argparse.ArgumentTypeError(f"{shown(text)}: give two numbers, like 3/10")
    i, n = map(int, numbers.groups())
    if not 1 <= i <= n:
        raise argparse.ArgumentTypeError(f"{shown(text)}: the first number is from 1 to the second")
    return i, n


def _harm(given: argparse.Namespace) -> None:
    """Measure the harm of methods on hostile streams."""
    from dataclasses import replace

    from ..core.console import PlainConsole
    from ..errors import ConfigError
    from ..evaluation.grid import Execution
    from ..evaluation.harm import CORRUPTIONS, IMAGES, METHODS, measure_harm
    from ..evaluation.store import Store
    from ..evaluation.testbed import open_testbed
    from ..report.harm import harm_overview

    plain = [each for each in methods(given.methods) if isinstance(each, str)] if given.methods is not None else METHODS
    if given.methods is not None and len(plain) < len(given.methods):
        raise ConfigError("--harm chooses the options of the methods: name the methods alone.")
    console = PlainConsole()
    testbed = open_testbed(
        given.model,
        given.data,
        given.root,
        replace(selection(given), corruptions=given.corruptions or CORRUPTIONS, images=given.images or IMAGES),
        weights=given.weights,
        mean=given.mean,
        std=given.std,
        source_statistics=given.source_statistics,
        device=given.device,
    )
    cells = measure_harm(
        testbed,
        plain,
        batch_size=given.batch_size,
        execution=Execution(given.device, given.threads, given.workers, given.jobs, given.on, given.gpus),
        store=Store(given.out),
        fresh=given.fresh,
        console=console if console.is_terminal else PlainConsole(stderr=True),
    )
    console.print(harm_overview(cells))


def _bench(given: argparse.Namespace) -> None:
    from ..core.console import PlainConsole
    from ..data.catalog import shows_corruptions
    from ..data.corruptions import CORRUPTIONS
    from ..errors import ConfigError
    from ..evaluation.bench import DEFAULT_METHODS, bench
    from ..evaluation.grid import Execution
    from ..evaluation.spec import Protocol
    from ..papers.dct.protocols import source_remarks
    from ..report.terminal import show

    if given.harm:
        _harm(given)
        return
    if given.full and given.corruptions is not None:
        raise ConfigError("--full is all 15 corruptions: leave out --corruptions.")
    console = PlainConsole()
    if given.realtime is not None:
        return _realtime(given, console)
    results = bench(
        given.model,
        given.data,
        given.root,
        methods=methods(given.methods) if given.methods is not None else DEFAULT_METHODS,
        settings=given.settings,
        seeds=given.seeds,
        corruptions=CORRUPTIONS if given.full else given.corruptions,
        severities=given.severities,
        domains=given.domains,
        labels=given.labels,
        images=given.images,
        constants=given.constants,
        partial=given.partial,
        batch_size=given.batch_size,
        order=given.order,
        tuned=given.tuned,
        reference=given.reference,
        weights=given.weights,
        mean=given.mean,
        std=given.std,
        source_statistics=given.source_statistics,
        protocol=Protocol(given.predict, given.guard and not given.reference, given.precision),
        execution=Execution(
            given.device,
            given.threads,
            given.workers,
            given.jobs,
            given.on,
            given.gpus,
            given.shard,
        ),
        out=given.out,
        fresh=given.fresh,
        console=console if console.is_terminal else PlainConsole(stderr=True),
    )
    show(results, console, remarks=source_remarks)
    chosen = given.corruptions is not None or given.full
    if not chosen and shows_corruptions(given.data, given.root, given.domains):
        console.print(RULE)
    found = sum(outcome.found for outcome in results)
    earlier = f"; {found} of {len(results)} were found there (--fresh runs them again)" if found else ""
    if given.tuned and not given.reference:
        _say_tuned(given.model, [outcome.spec.method for outcome in results], console)
    told = f"Results: {given.out}/{earlier}. Other tables of them: acclimate table {given.out} --help"
    console.print(told, markup=False, emoji=False)
    if given.data == given.model == "bundled" and not chosen and given.methods is None and given.settings == ["normal"]:
        console.print(NEXT, highlight=False, soft_wrap=True)


def _realtime(given: argparse.Namespace, console: Console) -> None:
    """Print the accuracies of methods without and under real time."""
    import torch
    from rich.table import Table

    from ..data.catalog import SHOWN, shows_corruptions
    from ..data.corruptions import CORRUPTIONS
    from ..data.streams import ARRANGEMENTS, Stream
    from ..errors import ConfigError
    from ..evaluation.bench import DEFAULT_METHODS
    from ..evaluation.realtime import compare
    from ._arguments import open_given

    if given.jobs > 1 or given.on or given.shard != (1, 1) or len(given.seeds) > 1 or len(given.settings) > 1:
        raise ConfigError("--realtime measures times: give one seed and one setting, and no --jobs, --on or --shard.")
    if given.reference or given.order or not given.tuned or not given.guard:
        raise ConfigError("--realtime does not go with --reference, --order, --no-tuned or --no-guard.")
    if given.predict != "before" or given.precision != "float32":
        raise ConfigError("--realtime does not go with --predict or --precision.")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    if given.corruptions is None and shows_corruptions(given.data, given.root, given.domains):
        given.corruptions = CORRUPTIONS if given.full else SHOWN
    chosen = methods(given.methods) if given.methods is not None else DEFAULT_METHODS
    pairs = [each if isinstance(each, tuple) else (each, {}) for each in chosen]
    testbed = open_given(given)
    (setting,), domains = given.settings, testbed.data.domains
    groups = [domains] if any(part in setting for part in ARRANGEMENTS) else [[domain] for domain in domains]
    streams = [Stream(group, setting, batch_size=given.batch_size, seed=given.seeds[0]) for group in groups]
    table = Table(title=f"Top-1 accuracy in %, mean over {len(streams)} streams, at {given.realtime:g} images a second")
    for title in ("method", "offline", "real time", "learned from", "lost"):
        table.add_column(title, justify="left" if title == "method" else "right")
    for row in compare(testbed, pairs, streams, given.realtime, seed=given.seeds[0]):
        shares = (row.offline, row.accuracy, row.learned, row.lost)
        table.add_row(row.method, *(f"{100 * share:.1f}" for share in shares))
    console.print(table)
    console.print("Times are those of this machine, as busy as it was. A lost image counts as wrong.")


def _say_tuned(model: str, used: list[str], console: Console) -> None:
    """Print which methods had options that were tuned for the model, if any had."""
    from ..models.loading import source_model

    chosen = source_model(model).options(64, True)
    tuned = [method for method in dict.fromkeys(used) if method in chosen]
    if tuned:
        console.print(f"With options tuned on four other corruptions: {', '.join(tuned)}. Others with default options.")
