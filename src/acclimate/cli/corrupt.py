"""`acclimate corrupt`."""

from __future__ import annotations

import argparse

from ._words import Commands, words

EPILOG = """\
examples:
  acclimate corrupt photos/ out/ --name fog --severity 5          writes out/fog/5/<as in photos>.JPEG
  acclimate corrupt photos/ out/ --name fog,snow --severity all   five severities of each
  acclimate corrupt val/ imagenet-c/ --imagenet-c                 all 15 corruptions of 224 x 224 crops, like ImageNet-C
  acclimate corrupt --sheet sheet.png photo.jpg                   one picture under everything, on one page

An interrupted run is taken up by giving the same command again.
"""


def add(commands: Commands) -> None:
    corrupt = commands.add_parser(
        "corrupt",
        help="write corrupted copies of a folder of pictures",
        description="Write corrupted copies of a folder of pictures, as a tree of the shape of ImageNet-C.",
        epilog=EPILOG,
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


def _corrupt(given: argparse.Namespace) -> None:
    from rich.console import Console

    from ..data.corruptions import CORRUPTIONS, EXTRA, SEVERITIES
    from ..data.folder import IMAGENET_C, corrupt_folder, read_picture
    from ..errors import ConfigError

    constants = given.constants or ("imagenet-c" if given.imagenet_c else None)
    resize_crop = IMAGENET_C if given.imagenet_c else None
    if given.sheet:
        if given.target or given.name or given.severity != "all":
            raise ConfigError("--sheet shows one picture under everything: acclimate corrupt --sheet FILE IMAGE.")
        from ..data.sheet import contact_sheet

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
    names = {"all": [*CORRUPTIONS, *EXTRA], None: CORRUPTIONS}.get(given.name) or words(given.name)
    try:
        severities = SEVERITIES if given.severity == "all" else [int(word) for word in words(given.severity)]
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
