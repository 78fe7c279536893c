"""The command `acclimate demo`."""

from __future__ import annotations

import argparse

from ._arguments import Commands, new_command
from .serve import add_network, require_packages, run_server

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
    from ..data import bundled
    from ..serve.application import Served, application
    from ..serve.demo import Demo, add_demo
    from ..serve.opening import open_adapter
    from ..serve.service import Service
    from ..serve.streams import Streams

    options = bundled.options(32).get(given.method, {})
    adapter, preprocess, labels = open_adapter("bundled", given.method, options, device="cpu")
    service = Service(Streams(adapter))
    app = application(service, Served("bundled", preprocess, labels, open_admin=True))
    demo = Demo(service, bundled.model())
    add_demo(app, demo)
    demo.start()
    run_server(app, given, opens=given.open)
