"""The command `acclimate corrupt`."""

from __future__ import annotations

import argparse

from ._arguments import CONSTANTS, SEVERITY, Commands, new_command
from ._parser import MOST_PROCESSES, input_folder, list_of, output_file, output_folder, seed, whole, words

POSITION = 140
ALL = (1, 2, 3, 4, 5)  # severities
EPILOG = """\
examples:
  acclimate corrupt photos/ out/ --corruptions fog --severities 5   writes out/fog/5/<as in photos>.JPEG
  acclimate corrupt photos/ out/ --corruptions fog,snow             five severities of each
  acclimate corrupt val/ imagenet-c/ --imagenet-c                 all 15 corruptions of 224 x 224 crops, like ImageNet-C
  acclimate bench --data folder --root out/ --model NAME          methods on what was written
  acclimate corrupt --sheet sheet.png photo.jpg                   one image under all corruptions, on one page

To continue an interrupted run, give the same command again.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    corrupt = new_command(
        commands,
        "corrupt",
        help="write corrupted copies of a folder of images",
        description="Write corrupted copies of a folder of images, as a tree of the shape of ImageNet-C.",
        epilog=EPILOG,
    )
    corrupt.add_argument("source", metavar="IN", help="a folder of images, in sub-folders or not; for --sheet an image")
    corrupt.add_argument(
        "target", nargs="?", type=output_folder, metavar="OUT", help="where to write: OUT/<corruption>/<severity>/..."
    )
    corrupt.add_argument(
        "--corruptions", type=words, metavar="LIST", help="default: the 15 of ImageNet-C; all: its 4 extra ones, too"
    )
    corrupt.add_argument(
        "--severities",
        "--severity",
        type=lambda text: ALL if text == "all" else list_of(SEVERITY)(text),
        default="all",
        metavar="LIST",
        help="1 to 5, or all; default: %(default)s",
    )
    corrupt.add_argument("--seed", type=seed, default=0, metavar="N", help="default: %(default)s")
    corrupt.add_argument(
        "--imagenet-c",
        action="store_true",
        help="as ImageNet-C was made: shorter side resized to 256, the central 224 x 224 cut out, its constants; "
        "without, every image keeps its size",
    )
    corrupt.add_argument(
        "--constants",
        choices=CONSTANTS,
        metavar="WHOSE",
        help="imagenet-c or cifar-10-c; default: by size, the latter up to 64 pixels",
    )
    corrupt.add_argument(
        "--frost",
        type=input_folder,
        metavar="DIR",
        help="a folder with ImageNet-C's photographs of ice; default: generated ice",
    )
    corrupt.add_argument(
        "--quality", type=whole(1, 100), default=85, metavar="1..100", help="quality of the JPEG files; default: %(default)s"
    )
    corrupt.add_argument("--skip-unreadable", action="store_true", help="leave out damaged images instead of refusing")
    corrupt.add_argument("--workers", type=whole(1, MOST_PROCESSES), metavar="N", help="threads; default: one per processor")
    corrupt.add_argument(
        "--sheet", type=output_file, metavar="FILE", help="write one page with all corruptions of the image IN"
    )
    corrupt.set_defaults(run=_corrupt)


def _corrupt(given: argparse.Namespace) -> None:
    from ..core.console import PlainConsole
    from ..data.corruptions import CORRUPTIONS, EXTRA
    from ..data.folder import IMAGENET_C, corrupt_folder, read_image
    from ..errors import ConfigError, printable

    constants = given.constants or ("imagenet-c" if given.imagenet_c else None)
    resize_crop = IMAGENET_C if given.imagenet_c else None
    if given.sheet:
        if given.target or given.corruptions or given.severities != ALL:
            raise ConfigError("--sheet shows one image under all corruptions: acclimate corrupt --sheet FILE IMAGE.")
        from ..data.sheet import contact_sheet

        page = contact_sheet(read_image(given.source, resize_crop), seed=given.seed, constants=constants, frost=given.frost)
        try:
            page.save(given.sheet)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--sheet {given.sheet}: {error}.") from None
        print(f"{printable(given.sheet)}: {page.width} x {page.height} pixels")
        return
    if given.target is None:
        raise ConfigError("give the folder to write to as well: acclimate corrupt IN OUT.")
    chosen = [*CORRUPTIONS, *EXTRA] if given.corruptions == ["all"] else given.corruptions or CORRUPTIONS
    report = corrupt_folder(
        given.source,
        given.target,
        chosen,
        given.severities,
        seed=given.seed,
        resize_crop=resize_crop,
        constants=constants,
        frost=given.frost,
        quality=given.quality,
        skip_unreadable=given.skip_unreadable,
        workers=given.workers,
        console=PlainConsole(),
    )
    print(f"{printable(given.target)}: {report}")
