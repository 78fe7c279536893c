"""The server on a Ray cluster: replicas of the model, and an ingress that passes each request to the one with its stream.

The ingress reads the name of the stream, and Ray's consistent hashing finds the replica. All replicas keep their states in
one folder. If a stream moves because a replica has come or gone, the new one asks the others to write and forget the state
before it reads it. A replica that was killed cannot do that: its streams go on from what it has written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..errors import ConfigError, InputError
from . import protocol
from .application import Served, application
from .limits import Bodies
from .service import UNNAMED, Service, log, show_log

NAME = "acclimate"  # of the application on the cluster
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
REQUESTS = 512  # of a replica at the same time; the queue of the service refuses before
HANDOVER = 10  # seconds that other replicas have to write a state
GRACE = 60  # seconds that a replica has to serve what waits and to write its states
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]


@dataclass(frozen=True)
class Cluster:
    """Where the server runs: the number of replicas, the address, the limits of requests, and whether on GPUs."""

    replicas: int
    host: str
    port: int
    bodies: Bodies
    gpu: bool = False


class Replica:
    """One replica of the model, with the application of the server."""

    def __init__(self, opened: Callable[[], tuple[Service, Served]]) -> None:
        show_log()
        self.service, served = opened()
        self.app = application(self.service, served)

    async def answer(self, scope: dict[str, Any], body: bytes, stream: str | None = None) -> Answer:
        """Return what the application answers to a request, after this replica has got the stream."""
        if stream is not None:
            await self._take_over(stream)
        received = iter([{"type": "http.request", "body": body}])
        sent: list[dict[str, Any]] = []
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            for message in received:
                return message
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        try:
            await self.app(scope, receive, send)  # type: ignore[arg-type]
        except Exception:
            if not sent:  # otherwise the application has answered with a 500
                raise
        finally:
            ended.set()
        return sent[0]["status"], sent[0]["headers"], b"".join(message.get("body", b"") for message in sent[1:])

    async def _take_over(self, stream: str) -> None:
        """Let the replica that has a stream write and forget it."""
        from ray import serve

        owner = await asyncio.to_thread(self.service.streams.owner, stream)
        if owner in (None, self.service.streams.me):
            return
        try:
            asked = serve.get_deployment_handle(Replica.__name__, NAME).broadcast("release", stream)
            await asked.results_async(timeout_s=HANDOVER, return_exceptions=True)
        except Exception as error:  # the stream goes on from what has been written
            log("error", stream=stream, error=f"{type(error).__name__}: {error}")

    async def release(self, stream: str) -> None:
        """Write and forget a stream, which another replica takes over."""
        await asyncio.wrap_future(self.service.control(lambda: self.service.streams.release(stream)))

    def check_health(self) -> None:
        """Let Ray replace a replica that no longer works."""
        if not self.service.is_alive:
            raise RuntimeError("The thread of the model has ended.")

    def __del__(self) -> None:
        self.service.close()  # Ray calls it before it stops a replica


class Ingress:
    """The part that takes requests, and passes each to the replica that has its stream."""

    def __init__(self, replicas: Any, bodies: Bodies) -> None:
        self.replicas, self.bodies = replicas, bodies

    async def __call__(self, request: Request) -> Response:
        """Return the answer of a replica."""
        try:
            async with self.bodies.of(request) as body:
                return await self._passed_on(request, body)
        except HTTPException as error:
            return _refusal(error)

    async def _passed_on(self, request: Request, body: bytes) -> Response:
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        scope["root_path"] = ""
        try:
            if request.method == "GET" and request.url.path == "/streams":
                return await self._all_streams(scope)
            stream = await asyncio.to_thread(_stream_of, request, body)
            chosen = self.replicas.options(session_id=stream or UNNAMED)
            status, headers, content = await chosen.answer.remote(scope, body, stream)
        except Exception as error:  # the replica has died, or none is ready
            log("error", path=request.url.path, error=f"{type(error).__name__}: {error}"[:500])
            return _refusal(HTTPException(503, "No replica has answered. Another one takes over.", {"Retry-After": "1"}))
        response = Response(content, status)
        response.raw_headers = headers
        return response

    async def _all_streams(self, scope: dict[str, Any]) -> Response:
        """Return the streams of all replicas, as those of one server."""
        answers = await self.replicas.broadcast("answer", scope, b"").results_async(return_exceptions=True)
        found = [json.loads(answer[2]) for answer in answers if not isinstance(answer, BaseException)]
        every = {name: [each for one in found for each in one[name]] for name in ("streams", "recent")}
        return JSONResponse({**found[0], **every, "waiting": sum(one["waiting"] for one in found)})


def _stream_of(request: Request, body: bytes) -> str | None:
    """Return the stream that a request is about, or None if it is about none. Wrong requests are refused by a replica."""
    path = request.url.path
    if path.startswith("/streams/"):
        return path.removeprefix("/streams/").rpartition("/")[0]
    if not path.endswith("/infer"):
        return None
    if request.headers.get("content-type", "").startswith("image/"):
        return request.query_params.get("sequence_id") or UNNAMED
    try:
        named = protocol.parse_stream(body, request.headers.get(protocol.HEADER))
    except InputError:
        return None
    return named or request.query_params.get("sequence_id") or UNNAMED


def _refusal(error: HTTPException) -> Response:
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


def run_on_ray(opened: Callable[[], tuple[Service, Served]], cluster: Cluster, **options: Any) -> None:
    """Serve on a Ray cluster until a signal ends it.

    Args:
        opened: A function that opens the service on each replica, and that can be pickled.
        cluster: Where the server runs.
        options: Options of Ray's HTTP server.
    """
    try:
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError as error:
        raise ConfigError("Ray Serve is not installed: pip install 'acclimate[ray]'.") from error
    started = "RAY_ADDRESS" not in os.environ
    here = {"address": "local", "num_cpus": max(os.cpu_count() or 1, cluster.replicas), "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **(here if started else {}))
    port = cluster.port or _free_port(cluster.host)
    try:
        serve.start(http_options={"host": cluster.host, "port": port, **options})
        replicas = serve.deployment(
            num_replicas=cluster.replicas,
            max_ongoing_requests=REQUESTS,
            graceful_shutdown_timeout_s=GRACE,
            ray_actor_options={"num_cpus": 1, "num_gpus": int(cluster.gpu)},
            request_router_config=RequestRouterConfig(
                request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": 0}
            ),
        )(Replica)
        ingress = serve.deployment(max_ongoing_requests=REQUESTS, ray_actor_options={"num_cpus": 0})(Ingress)
        try:
            serve.run(ingress.bind(replicas.bind(opened), cluster.bodies), name=NAME, route_prefix="/")
        except RuntimeError as error:
            told = [each.message.strip() for each in serve.status().applications[NAME].deployments.values()]
            last = [message.splitlines()[-1] for message in told if message]  # of a traceback
            raise ConfigError(f"The replicas have not started: {' '.join(last) or error}") from error
        scheme = "https" if options.get("ssl_certfile") else "http"
        print(f"Listening on {scheme}://{cluster.host}:{port}/", flush=True)
        _wait_for_a_signal()
        serve.delete(NAME)
    finally:
        if started:
            serve.shutdown()
        ray.shutdown()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _wait_for_a_signal() -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
