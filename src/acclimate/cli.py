"""The command line. It imports torch only once a command needs it, so that help is immediate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .errors import AcclimateError

EPILOG = """\
examples:
  acclimate bench                       how much does adaptation help? four methods, four corruptions, two minutes
  acclimate corrupt photos/ out/ --name fog --severity 5
                                        fog over a folder of pictures, as in ImageNet-C
  acclimate methods                     all methods: what each adapts, and its paper
  acclimate methods dct                 one method with its options and their defaults
  acclimate inspect tuesday.safetensors what a state file holds
  acclimate check mine.py               run the conformance suite on the methods that a file registers

in Python:
  model = acclimate.adapt(model, "dct")   wraps a timm, transformers or torchvision ViT
  logits = model(images)                  predicts, and adapts
"""

BENCH_EPILOG = """\
examples:
  acclimate bench                                     source, tent, sar and dct under four corruptions
  acclimate bench --full --seeds 0,1,2                all 15 corruptions, mean and deviation over three orders
  acclimate bench --methods source,dct --setting continual+label-shift --corruptions fog,snow,frost
"""

CORRUPT_EPILOG = """\
examples:
  acclimate corrupt photos/ out/ --name fog --severity 5          writes out/fog/5/<as in photos>.JPEG
  acclimate corrupt photos/ out/ --name fog,snow --severity all   five severities of each
  acclimate corrupt val/ imagenet-c/ --imagenet-c                 all 15 corruptions of 224 x 224 crops, like ImageNet-C
  acclimate corrupt --sheet sheet.png photo.jpg                   one picture under everything, on one page

An interrupted run is taken up by giving the same command again.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="acclimate",
        description="Vision transformers that adapt to a new domain while they predict.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"acclimate {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    methods = commands.add_parser("methods", help="list the methods, or explain one")
    methods.add_argument("name", nargs="?", metavar="NAME", help="explain this method and its options")
    methods.set_defaults(run=lambda given: _explain(given.name) if given.name else _list())

    inspect = commands.add_parser("inspect", help="show what a state file holds")
    inspect.add_argument("file", metavar="FILE", help="a file written by Adapter.save()")
    inspect.set_defaults(run=lambda given: _inspect(given.file))

    check = commands.add_parser("check", help="run the conformance suite on a method")
    check.add_argument("method", metavar="METHOD", help="a method's name, or a Python file that registers some")
    check.set_defaults(run=lambda given: _check(given.method))

    bench = commands.add_parser(
        "bench",
        help="compare methods on the bundled model and images",
        description="Compare methods on the bundled ViT and images (Fashion-MNIST) under corruptions unknown to it. "
        "Every method meets the same images in the same order. Finished runs are kept and not run again.",
        epilog=BENCH_EPILOG,
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
        default="imagenet-c",
        metavar="WHOSE",
        help="how strong a severity is: %(default)s, the default, or cifar-10-c, which hardly harms these pictures",
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

    corrupt = commands.add_parser(
        "corrupt",
        help="write corrupted copies of a folder of pictures",
        description="Write corrupted copies of a folder of pictures, as a tree of the shape of ImageNet-C.",
        epilog=CORRUPT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    corrupt.add_argument("source", metavar="IN", help="a folder of pictures, in sub-folders or not; for --sheet a picture")
    corrupt.add_argument("target", nargs="?", metavar="OUT", help="where to write: OUT/<corruption>/<severity>/...")
    corrupt.add_argument(
        "--name", metavar="LIST", help="corruptions; default: the 15 of ImageNet-C; all: its 4 extra ones, too"
    )
    corrupt.add_argument("--severity", default="all", metavar="LIST", help="1 to 5, or all; default: %(default)s")
    corrupt.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    corrupt.add_argument(
        "--imagenet-c",
        action="store_true",
        help="as ImageNet-C was made: shorter side resized to 256, the central 224 x 224 cut out, its constants; "
        "without, every picture keeps its size",
    )
    corrupt.add_argument(
        "--constants", metavar="WHOSE", help="imagenet-c or cifar-10-c; default: by size, the latter up to 64 pixels"
    )
    corrupt.add_argument(
        "--frost", metavar="DIR", help="a folder with ImageNet-C's photographs of ice; default: ice of our own"
    )
    corrupt.add_argument("--quality", type=int, default=85, metavar="1..100", help="of the JPEG files; default: %(default)s")
    corrupt.add_argument("--skip-unreadable", action="store_true", help="leave out damaged pictures instead of refusing")
    corrupt.add_argument("--workers", type=int, metavar="N", help="threads; default: one per processor")
    corrupt.add_argument("--sheet", metavar="FILE", help="write one page with all corruptions of the picture IN")
    corrupt.set_defaults(run=_corrupt)

    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except AcclimateError as error:
        print(f"acclimate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nacclimate: interrupted. What was finished is whole; bench and corrupt go on from there.", file=sys.stderr)
        return 130
    return 0


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from .method import find, list_methods

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("method", "adapts", "paper"):
        table.add_column(column)
    for name in list_methods():
        cls = find(name)
        table.add_row(name, cls.adapts, cls.paper)
    Console().print(table)


def _explain(name: str) -> None:
    import inspect

    from .method import find

    cls = find(name)
    print(f"{name} ({cls.paper}); adapts {cls.adapts}\n\n{inspect.cleandoc(cls.__doc__ or '')}\n")
    defaults = ", ".join(f"{option}={p.default!r}" for option, p in cls.options().items())
    print(f"acclimate.adapt(model, {name!r}, {defaults})")


def _inspect(path: str) -> None:
    import json

    from .state import read

    tensors, header = read(path)
    print(json.dumps(header, indent=2))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    print(f"{len(tensors)} tensors, {size / 2**20:.1f} MiB")


def _check(method: str) -> None:
    from .check import check_method
    from .errors import ConfigError
    from .method import list_methods

    names = [method]
    if method.endswith(".py"):
        import runpy

        known = set(list_methods())
        runpy.run_path(method)
        names = [name for name in list_methods() if name not in known]
        if not names:
            raise ConfigError(f"{method} registers no method: decorate a class with acclimate.register(...).")
    for name in names:
        for where, outcome in check_method(name).items():
            print(f"{name}  {where}: {outcome}")


def _bench(given: argparse.Namespace) -> None:
    from rich.console import Console

    from .bench.store import Store
    from .bench.sweep import sweep
    from .bench.tables import terminal
    from .data import bundled
    from .data.corruptions import CORRUPTIONS
    from .data.datasets import Corrupted
    from .data.streams import ARRANGEMENTS, Stream
    from .errors import ConfigError

    everything = bundled.images()
    most = len(everything.labels) - bundled.FOR_TUNING
    if given.images > most:
        raise ConfigError(f"--images {given.images}: at most {most}; the options were tuned on the others.")
    if given.full and given.corruptions is not None:
        raise ConfigError("--full is all corruptions: leave out --corruptions.")
    names = (
        CORRUPTIONS
        if given.full
        else bundled.SHOWN
        if given.corruptions is None
        else _listed("corruptions", given.corruptions)
    )
    severities = [bundled.SEVERITY if given.severity is None else given.severity]
    if "gradual" in given.setting:
        if given.severity is not None:
            raise ConfigError("--severity does not go with the setting gradual, which has all five.")
        severities = [1, 2, 3, 4, 5]
    try:
        seeds = [int(seed) for seed in _listed("seeds", given.seeds)]
    except ValueError:
        raise ConfigError(f"--seeds {given.seeds}: give whole numbers, separated by commas.") from None
    tuned = {} if given.defaults else bundled.tuned()
    methods = {method: tuned.get(method, {}) for method in _listed("methods", given.methods)}

    images = everything.sample(given.images)
    domains = [
        Corrupted(images, n, s, mean=bundled.MEAN, std=bundled.STD, constants=given.constants)
        for n in names
        for s in severities
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
            f"Top-1 in %: {given.images} images, {severity} of {given.constants}, {given.setting}, seeds {given.seeds}",
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


def _corrupt(given: argparse.Namespace) -> None:
    from rich.console import Console

    from .data.corruptions import CORRUPTIONS, EXTRA, SEVERITIES
    from .data.folder import IMAGENET_C, corrupt_folder, read_picture
    from .errors import ConfigError

    constants = given.constants or ("imagenet-c" if given.imagenet_c else None)
    resize_crop = IMAGENET_C if given.imagenet_c else None
    if given.sheet:
        if given.target or given.name or given.severity != "all":
            raise ConfigError("--sheet shows one picture under everything: acclimate corrupt --sheet FILE IMAGE.")
        from .data.sheet import contact_sheet

        page = contact_sheet(
            read_picture(given.source, resize_crop), seed=given.seed, constants=constants, frost=given.frost
        )
        try:
            page.save(given.sheet)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--sheet {given.sheet}: {error}.") from None
        print(f"{given.sheet}: {page.width} x {page.height} pixels")
        return
    if given.target is None:
        raise ConfigError("give the folder to write to as well: acclimate corrupt IN OUT.")
    names = {"all": [*CORRUPTIONS, *EXTRA], None: CORRUPTIONS}.get(given.name) or _words(given.name)
    try:
        severities = SEVERITIES if given.severity == "all" else [int(word) for word in _words(given.severity)]
    except ValueError:
        raise ConfigError(f"--severity {given.severity}: give numbers from 1 to 5, separated by commas, or all.") from None
    report = corrupt_folder(
        given.source,
        given.target,
        names,
        severities,
        seed=given.seed,
        resize_crop=resize_crop,
        constants=constants,
        frost=given.frost,
        quality=given.quality,
        skip_unreadable=given.skip_unreadable,
        workers=given.workers,
        console=Console(),
    )
    print(f"{given.target}: {report}")


def _listed(option: str, text: str) -> list[str]:
    """A list that has something in it, and nothing twice."""
    from .errors import ConfigError

    words = _words(text)
    if not words or len(set(words)) < len(words):
        raise ConfigError(f"--{option} {text!r}: name one or several, separated by commas, each once.")
    return words


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


if __name__ == "__main__":
    sys.exit(main())
