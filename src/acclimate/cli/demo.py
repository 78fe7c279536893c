"""The command `acclimate demo`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ._arguments import Commands, new_command
from .serve import add_network, one_method, require_packages, run_server

if TYPE_CHECKING:
    from fastapi import FastAPI

POSITION = 5
EPILOG = """\
example:
  acclimate demo                        opens the page, or prints its address: move the sliders there

The bundled images pass through fog, frost and noise. The page draws the accuracy of the source model and of the model that
adapts, side by side. Nothing is downloaded, and the server listens on this machine alone.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    demo = new_command(
        commands,
        "demo",
        help="watch a model adapt in the browser",
        description="Watch a model adapt in the browser, with the bundled model and images.",
        epilog=EPILOG,
    )
    demo.add_argument("--method", default="keel", metavar="NAME", help="default: %(default)s")
    demo.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        help="open the page in a browser; default: if the terminal belongs to a screen",
    )
    add_network(demo)
    demo.set_defaults(run=_demo)


def _demo(given: argparse.Namespace) -> None:
    require_packages()
    run_server(lambda: _open(given.method), given, opens=_has_screen() if given.open is None else given.open)


def _has_screen() -> bool:
    """Return whether somebody would see a window of a browser. In a terminal alone, a browser would take its place."""
    import os
    import sys

    names = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.stdout.isatty() and (sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in names))


def _open(chosen: str) -> FastAPI:
    """Return the application of the demonstration, whose stream has started."""
    from ..data import bundled
    from ..serve.application import Served, application
    from ..serve.demo import Demo, add_demo
    from ..serve.opening import open_adapter
    from ..serve.service import Service
    from ..serve.streams import Streams

    method, options = one_method(chosen)
    options = {**bundled.options(32).get(method, {}), **options}
    adapter, preprocess, labels = open_adapter("bundled", method, options, device="cpu")
    service = Service(Streams(adapter), show=False)  # the demonstration shows its own images
    app = application(service, Served("bundled", preprocess, labels, open_admin=True))
    demo = Demo(service, bundled.model())
    add_demo(app, demo)
    demo.start()
    return app
