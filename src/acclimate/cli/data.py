"""The command `acclimate data`."""

from __future__ import annotations

import argparse

from ._arguments import SEVERITY, Commands, add_labels, new_command
from ._parser import list_of, words

POSITION = 50
EPILOG = """\
examples:
  acclimate data list                                              the data sets that are known, and their layouts
  acclimate data check --data imagenet-c --root /data/ImageNet-C   is everything there?
  acclimate data check --data folder --root photos/ --open-images
                                                                   and can every image be read?
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    data = new_command(
        commands,
        "data",
        help="list the known data sets, or check one on disk",
        description="List the known data sets and their layouts, or check a copy on disk.",
        epilog=EPILOG,
    )
    parts = data.add_subparsers(title="commands", metavar="COMMAND", required=True)

    parts.add_parser("list", help="list the known data sets and their layouts").set_defaults(run=lambda given: _list())

    check = parts.add_parser(
        "check",
        help="say what a data set contains, and what is missing or wrong",
        description="Say what a data set contains, and what is missing or wrong. Fails if it cannot be used as it is.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("--data", required=True, metavar="NAME", help="a name in: acclimate data list")
    check.add_argument("--root", required=True, metavar="DIR", help="where it is")
    check.add_argument("--corruptions", type=words, metavar="LIST", help="those that must be there; default: the 15")
    check.add_argument(
        "--severities",
        "--severity",
        type=list_of(SEVERITY),
        metavar="LIST",
        help="those that must be there; default: 5, and others are checked if they are there",
    )
    check.add_argument("--domains", type=words, metavar="LIST", help="domains of Office-Home (default: all), or of a folder")
    add_labels(check)
    check.add_argument("--file-list", metavar="FILE", help="of visda-2021, from DIR")
    check.add_argument("--open-images", action="store_true", help="read every image, too")
    check.set_defaults(run=_check)


def _list() -> None:
    from rich.table import Table

    from ..core.console import PlainConsole
    from ..data.catalog import data_sets

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("data set", "what", "below its root", "from"):
        table.add_column(column, overflow="fold", no_wrap=column == "data set")
    for name, entry in data_sets().items():
        table.add_row(name, entry.about, entry.shape, entry.origin)
    PlainConsole().print(table)


def _check(given: argparse.Namespace) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..core.console import PlainConsole
    from ..data.catalog import check_data
    from ..errors import printable

    console = PlainConsole()
    report = check_data(
        given.data,
        given.root,
        corruptions=given.corruptions,
        severities=given.severities,
        domains=given.domains,
        file_list=given.file_list,
        labels=given.labels,
        open_images=given.open_images,
        console=console,
    )
    if not any(row.labels for row in report.rows):
        raise report.error()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("domain")
    for column in ("images", "expected", "classes"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in report.rows:
        state = Text("complete", "green")
        if row.problems:
            state = Text("not complete" if row.labels else "not there", "red")
        expected = "any" if row.expected is None else str(row.expected)
        table.add_row(Text(str(row.key)), str(len(row.labels)), expected, str(len(set(row.labels))), state)
    console.print(table)
    unreadable = [text for row in report.rows for text in row.unreadable]
    for problem in [*unreadable, *report.problems]:
        console.print(problem, style="red", highlight=False, soft_wrap=True)
    if report.absent:
        console.print(f"{len(report.absent)} other domains (severities, extra corruptions) are not there.", style="dim")
    if not report.usable:
        raise report.error(most=1)
    console.print(f"{printable(given.root)} can be used as {given.data}.", style="green", highlight=False, soft_wrap=True)
