"""The command `acclimate serve`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ._arguments import Commands, add_device, add_model, new_command
from ._parser import Parser, input_file, number, output_folder, whole

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

    from ..serve.application import Served
    from ..serve.service import Service

POSITION = 32
LOCAL = ("127.0.0.1", "::1", "localhost")
CONNECTIONS = 512  # at the same time; further ones get a 503
HEADER_SECONDS = 10  # after which, or after twice as many, a connection is closed if no request begins on it
GRACE = 40  # seconds that requests have to end after a signal
EPILOG = """\
examples:
  acclimate serve --model vit_base_patch16_224.augreg_in21k_ft_in1k --method keel --states states/
  curl --data-binary @cat.jpg -H 'Content-Type: image/jpeg' \\
      'http://127.0.0.1:8000/v2/models/NAME/infer?sequence_id=camera-1'
  acclimate serve ... --states /shared/states --on ray --replicas 4     on a Ray cluster (RAY_ADDRESS), or on a local one
  acclimate demo                        the live page, with the bundled model and images

The protocol is the Open Inference Protocol, version 2, over HTTP: JSON, the binary tensor extension, or a file of an image.
The name of the model in the path is that of --name. Every sequence_id is a stream with a state of its own over the shared
model. The page at / shows all streams. docs/serve.md explains the rest.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    serve = new_command(
        commands,
        "serve",
        help="serve a model that adapts to every stream of requests",
        description="Serve a model over HTTP that adapts to every stream of requests.",
        epilog=EPILOG,
    )
    what = serve.add_argument_group("what")
    add_model(what, default=None)
    what.add_argument(
        "--name", metavar="NAME", help="the name of the model in paths; default: that of --model, without folder"
    )
    what.add_argument("--method", default="keel", metavar="NAME", help="keel, or dct:lr=0.001; default: %(default)s")
    what.add_argument("--source-statistics", type=input_file, metavar="FILE", help="for a method that needs some")
    add_device(what)
    streams = serve.add_argument_group("streams")
    streams.add_argument("--states", type=output_folder, metavar="DIR", help="where the states of streams are kept")
    streams.add_argument(
        "--resident", type=whole(1), default=64, metavar="N", help="streams in memory; default: %(default)s"
    )
    streams.add_argument(
        "--streams", type=whole(1), default=10_000, metavar="N", help="of all streams; default: %(default)s"
    )
    streams.add_argument(
        "--max-states", type=whole(1), metavar="BYTES", help="of all states, beyond which there are no new streams"
    )
    streams.add_argument("--age", type=number(1), metavar="SECONDS", help="without a request until a stream is removed")
    streams.add_argument(
        "--write-after",
        type=number(0),
        default=5.0,
        metavar="SECONDS",
        help="until a change is written; default: %(default)s",
    )
    streams.add_argument(
        "--unnamed",
        choices=["learn", "predict"],
        default="learn",
        help="requests without sequence_id share a stream, or the source model predicts them; default: %(default)s",
    )
    load = serve.add_argument_group("load")
    load.add_argument("--queue", type=whole(1), default=512, metavar="N", help="images that may wait; default: %(default)s")
    load.add_argument(
        "--batch", type=whole(1), default=64, metavar="N", help="images of joined requests; default: %(default)s"
    )
    load.add_argument(
        "--delay",
        type=number(0, 10_000),
        default=0.0,
        metavar="MS",
        help="that a request waits for others of its stream, to be joined with them; default: %(default)s",
    )
    load.add_argument(
        "--timeout", type=number(0.001), default=30.0, metavar="SECONDS", help="a request may wait; default: %(default)s"
    )
    load.add_argument(
        "--max-body", type=whole(1), default=64 * 2**20, metavar="BYTES", help="of a request; default: %(default)s"
    )
    load.add_argument(
        "--max-bodies",
        type=whole(1),
        default=512 * 2**20,
        metavar="BYTES",
        help="of all requests at the same time; default: %(default)s",
    )
    cluster = serve.add_argument_group("cluster")
    cluster.add_argument("--on", choices=["ray"], help="serve on a Ray cluster (pip install 'acclimate[ray,serve]')")
    cluster.add_argument(
        "--replicas", type=whole(1), default=2, metavar="N", help="of the model on a cluster; default: %(default)s"
    )
    add_network(serve)
    security = serve.add_argument_group("security")
    security.add_argument("--auth-token-file", type=input_file, metavar="FILE", help="with the token that changes streams")
    security.add_argument(
        "--images",
        action=argparse.BooleanOptionalAction,
        help="show some images of requests on the page; default: if the server listens on this machine alone",
    )
    security.add_argument("--ssl-certfile", type=input_file, metavar="FILE", help="serve HTTPS with this certificate")
    security.add_argument("--ssl-keyfile", type=input_file, metavar="FILE", help="its key")
    serve.set_defaults(run=_serve)


def add_network(command: Parser) -> None:
    """Add the arguments that say where a server listens."""
    network = command.add_argument_group("network")
    network.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default: %(default)s, this machine alone"
    )
    network.add_argument("--port", type=whole(0, 65535), default=8000, help="default: %(default)s; 0: any that is free")


def require_packages() -> None:
    """Refuse to start without the packages of the server."""
    from importlib.util import find_spec

    from ..errors import ConfigError

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is not installed: pip install 'acclimate[serve]'.")


def one_method(text: str) -> tuple[str, Mapping[str, Any]]:
    """Return the method that `--method` names, and its options."""
    from ..errors import ConfigError
    from ._arguments import methods

    chosen = methods([text])
    if len(chosen) != 1:
        raise ConfigError(f"--method {text}: give one method.")
    return chosen[0] if isinstance(chosen[0], tuple) else (chosen[0], {})


def run_server(
    opened: Callable[[], FastAPI], given: argparse.Namespace, *, opens: bool = False, **options: str | None
) -> None:
    """Serve an application until a signal ends it, and print where it listens.

    Args:
        opened: A function that opens the application. It is called when the address is known to be free.
        given: The arguments, with an address.
        opens: Whether the page is shown in the browser.
        options: Options of uvicorn.
    """
    import webbrowser
    from contextlib import suppress

    import uvicorn

    from ..serve.limits import idle_closer, with_room
    from ..serve.service import show_log

    show_log()
    listener = _bound(given.host, given.port)
    app = opened()
    listener.listen(CONNECTIONS)
    scheme = "https" if options.get("ssl_certfile") else "http"
    host = f"[{given.host}]" if ":" in given.host else given.host
    address = f"{scheme}://{host}:{listener.getsockname()[1]}/"
    print(f"Listening on {address}", flush=True)
    if opens:
        webbrowser.open(address)
    about: dict[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False, "ws": "none", **options}
    about |= {"timeout_graceful_shutdown": GRACE, "timeout_notify": HEADER_SECONDS}
    server = uvicorn.Server(
        uvicorn.Config(with_room(app, lambda: len(server.server_state.connections) > CONNECTIONS), **about)
    )
    server.config.callback_notify = idle_closer(server.server_state.connections)
    with suppress(KeyboardInterrupt):  # which uvicorn raises again after it has ended as it should
        server.run(sockets=[listener])


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that has an address of its own, but does not listen yet."""
    import socket

    from ..errors import ConfigError

    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port} cannot be used: {error.strerror or error}.") from error
    return listener


def _token(file: str) -> str:
    """Return the token in a file."""
    from ..errors import ConfigError

    with open(file, encoding="utf-8", errors="replace") as opened:
        token = opened.read(4096).strip()
    if len(token) < 16 or not token.isascii() or token.split() != [token]:
        raise ConfigError(f"{file}: a token has 16 ASCII characters at least, and no spaces.")
    return token


def _require_certificate(certificate: str | None, key: str | None) -> None:
    """Refuse files with which no HTTPS can be served."""
    import ssl

    from ..errors import ConfigError

    if certificate is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile.")
        return

    def ask() -> str:
        raise ConfigError(f"{key or certificate}: the key has a password, which nobody could type when the server restarts.")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, ask)
    except ssl.SSLError as error:
        where = certificate if key is None else f"{certificate}, {key}"
        raise ConfigError(f"{where}: no certificate with its key in the PEM format ({error.reason or error}).") from error


def _serve(given: argparse.Namespace) -> None:
    require_packages()
    import os
    from functools import partial

    from ..errors import ConfigError

    if given.model is None:
        raise ConfigError("--model is missing: give bundled, timm's name with its tag, or a file of train-source.")
    if given.name is not None and (not given.name.isprintable() or "/" in given.name or not given.name):
        raise ConfigError(f"--name {given.name!r}: a name in paths has printable characters, and no slash.")
    if given.max_bodies < given.max_body:
        raise ConfigError(f"--max-bodies {given.max_bodies} is less than --max-body {given.max_body}, of one request.")
    if given.delay >= 1000 * given.timeout:
        raise ConfigError(f"--delay {given.delay:g} milliseconds are not less than --timeout {given.timeout:g} seconds.")
    token = None if given.auth_token_file is None else _token(given.auth_token_file)
    opened = partial(_open, given, *one_method(given.method), token)
    _require_certificate(given.ssl_certfile, given.ssl_keyfile)
    secure = {"ssl_certfile": given.ssl_certfile, "ssl_keyfile": given.ssl_keyfile}
    if given.on == "ray":
        from ..serve.limits import Bodies
        from ..serve.on_ray import Cluster, run_on_ray

        if given.states is None:
            raise ConfigError("--states is missing: on a cluster, give a folder that all machines see.")
        given.states = os.path.abspath(given.states)
        gpu = str(given.device or "").startswith("cuda")
        bodies = Bodies(given.max_body, given.max_bodies)
        run_on_ray(opened, Cluster(given.replicas, given.host, given.port, bodies, gpu), **secure)
    else:
        from ..serve.application import application

        run_server(lambda: application(*opened()), given, **secure)


def _open(given: argparse.Namespace, method: str, options: Mapping[str, Any], token: str | None) -> tuple[Service, Served]:
    """Return the service that the arguments describe, and what it serves."""
    import os

    from ..serve.application import Served
    from ..serve.limits import Bodies
    from ..serve.opening import open_adapter
    from ..serve.service import Service, log
    from ..serve.streams import Streams

    if given.states is None:
        log("no folder for states: they are lost when a stream leaves the memory, and at the end (--states DIR)")
    adapter, preprocess, labels = open_adapter(
        given.model,
        method,
        options,
        weights=given.weights,
        mean=given.mean,
        std=given.std,
        source_statistics=given.source_statistics,
        device=given.device,
    )
    streams = Streams(
        adapter,
        given.states,
        resident=given.resident,
        most=given.streams,
        most_bytes=given.max_states,
        age=given.age,
        interval=given.write_after,
        shared=given.on == "ray",
    )
    service = Service(
        streams,
        queue=given.queue,
        batch=given.batch,
        delay=given.delay / 1000,
        timeout=given.timeout,
        learn_unnamed=given.unnamed == "learn",
        show=given.host in LOCAL if given.images is None else given.images,
    )
    name = given.name or os.path.basename(given.model).removesuffix(".safetensors")
    return service, Served(name, preprocess, labels, token, Bodies(given.max_body, given.max_bodies))
