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
  acclimate demo                        then open the address that it prints, and move the sliders

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
    demo.add_argument("--open", action="store_true", help="open the page in the browser of this machine")
    add_network(demo)
    demo.set_defaults(run=_demo)


def _demo(given: argparse.Namespace) -> None:
    require_packages()
    run_server(lambda: _open(given.method), given, opens=given.open)


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
