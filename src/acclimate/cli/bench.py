"""The command `acclimate bench`."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from ._arguments import Commands, add_data, add_device, add_model, add_selection, add_workers, methods, new_command
from ._parser import MOST_PROCESSES, input_file, input_files, list_of, number, output_folder, seed, shown, whole, words

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

  acclimate bench ... --jobs 4                        four processes on this machine
  acclimate bench ... --on ray                        tasks on a Ray cluster (RAY_ADDRESS), or on a local one
  acclimate bench ... --shard 3/10                    the third of ten parts, for any other scheduler

Interrupted, by Ctrl-C or kill -9, the same command goes on in mid-stream and ends with the same results to the last bit.
Finished runs are kept in --out and not run again; `acclimate table runs/` makes tables of them.
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
        help="watch for collapse, which the papers' code does not",
    )
    how.add_argument(
        "--precision",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        metavar="TYPE",
        help="float32, bfloat16 or float16",
    )

    where = bench.add_argument_group("where")
    add_device(where)
    where.add_argument(
        "--threads",
        type=whole(1, MOST_PROCESSES),
        metavar="N",
        help="of each process, on a CPU; decides how sums are rounded",
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
        "--gpus", type=number(0, MOST_PROCESSES), metavar="N", help="of each run on Ray; default: 1 if there is one"
    )
    where.add_argument("--shard", type=_shard, default="1/1", metavar="I/N", help="only the I-th of N parts of the grid")
    where.add_argument(
        "--out", type=output_folder, default="runs", metavar="DIR", help="where runs are kept; default: %(default)s"
    )
    where.add_argument("--fresh", action="store_true", help="run again what was run before")
    bench.set_defaults(run=_bench)


def _shard(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if numbers is None:
        raise argparse.ArgumentTypeError(f"{shown(text)}: give two numbers, like 3/10")
    i, n = map(int, numbers.groups())
    if not 1 <= i <= n:
        raise argparse.ArgumentTypeError(f"{shown(text)}: the first number is from 1 to the second")
    return i, n


def _bench(given: argparse.Namespace) -> None:
    from ..core.console import PlainConsole
    from ..data.corruptions import CORRUPTIONS
    from ..errors import ConfigError
    from ..evaluation.bench import DEFAULT_METHODS, bench
    from ..evaluation.grid import Execution
    from ..evaluation.spec import Protocol
    from ..papers.dct.protocols import source_remarks
    from ..report.terminal import show

    if given.full and given.corruptions is not None:
        raise ConfigError("--full is all 15 corruptions: leave out --corruptions.")
    console = PlainConsole()
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
    if given.data in ("bundled", "folder") and not chosen:
        console.print(RULE)
    found = sum(outcome.found for outcome in results)
    earlier = f"; {found} of {len(results)} were found there (--fresh runs them again)" if found else ""
    if given.tuned and not given.reference:
        _say_tuned(given.model, [outcome.spec.method for outcome in results], console)
    told = f"Results: {given.out}/{earlier}. Other tables of them: acclimate table {given.out} --help"
    console.print(told, markup=False, emoji=False)
    if given.data == given.model == "bundled" and not chosen and given.methods is None and given.settings == ["normal"]:
        console.print(NEXT, highlight=False, soft_wrap=True)


def _say_tuned(model: str, used: list[str], console: Console) -> None:
    """Print which methods had options that were tuned for the model, if any had."""
    from ..models.loading import source_model

    chosen = source_model(model).options(64, True)
    tuned = [method for method in dict.fromkeys(used) if method in chosen]
    if tuned:
        console.print(f"With options tuned on four other corruptions: {', '.join(tuned)}. Others with default options.")
