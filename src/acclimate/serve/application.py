"""The web application: the Open Inference Protocol, an API to manage streams, metrics, and the live page.

| path | what |
|---|---|
| GET /v2, /v2/health, /v2/health/live, /v2/health/ready | the server |
| GET /v2/models/M[/versions/V][/ready] | the model: its inputs and outputs, and whether it is ready |
| POST /v2/models/M[/versions/V]/infer | logits and classes of images; the body may be a file of an image |
| GET /streams | all streams in memory, and the latest images, for the page |
| POST /streams/S/reset, rollback, snapshot, freeze, thaw | with the token: change a stream |
| GET, PUT, DELETE /streams/S/state | with the token: download, upload or remove the state of a stream |
| GET /metrics | Prometheus |
| GET / | the live page |
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException

from .. import __version__
from ..data.imagefile import count_pixels, decode_image, most_pixels
from ..data.preprocess import Preprocess
from ..errors import AcclimateError, InputError, StateError
from . import protocol
from .limits import Bodies
from .protocol import HEADER, InferRequest, StreamName
from .service import UNNAMED, Job, Refused, Service, log
from .streams import TooManyStreams

VERSION = "1"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
PAGE = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript"), "/page.css": ("page.css", "text/css")}
LARGEST = 4  # images of the largest size whose pixels a request may have, because small files may have many
DECODERS = 2  # requests that are decoded at the same time, which bounds the memory that large ones need
T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """What is served: a model with a name, its preprocessing and the names of its classes.

    Args:
        name: The name of the model in paths.
        preprocess: The preprocessing of files of images.
        labels: The names of the classes.
        token: The token of the API that changes streams. None closes this API.
        bodies: The limits of the bodies of requests.
        open_admin: Whether streams can be changed without a token, as in the demonstration.
    """

    name: str
    preprocess: Preprocess
    labels: tuple[str, ...]
    token: str | None = None
    bodies: Bodies = field(default_factory=Bodies)
    open_admin: bool = False


def application(service: Service, served: Served) -> FastAPI:
    """Return the application of a service, which it closes at its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        log("started", model=served.name, method=service.adapter.method.name)
        yield
        log("draining", waiting=service.waiting)
        await asyncio.to_thread(service.close)
        log("stopped")

    app = FastAPI(title="acclimate", version=__version__, lifespan=lifespan, openapi_url=None)
    decoders = asyncio.Semaphore(DECODERS)

    @app.middleware("http")
    async def counted(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call(request)
        service.metrics.requests.labels(str(response.status_code)).inc()
        return response

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        service.metrics.requests.labels("500").inc()
        log("error", path=request.url.path, error=f"{type(error).__name__}: {error}")
        return JSONResponse({"error": "The server failed. Its log says why."}, 500)

    # ---- the protocol -----------------------------------------------------------------------------------------

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        return {"name": "acclimate", "version": __version__, "extensions": ["binary_tensor_data", "sequence"]}

    @app.get("/v2/health/live")
    async def live() -> dict[str, Any]:
        return {"live": True}

    @app.get("/v2/health")
    @app.get("/v2/health/ready")
    async def ready() -> dict[str, Any]:
        if not service.is_alive:
            raise HTTPException(503, "The server is shutting down.")
        return {"ready": True}

    def require_model(model: str, version: str) -> None:
        if model != served.name or version != VERSION:
            raise HTTPException(
                404, f"There is no model {model!r} in version {version}: there is {served.name!r}, {VERSION}."
            )

    @app.get("/v2/models/{model}/ready")
    @app.get("/v2/models/{model}/versions/{version}/ready")
    async def model_ready(model: str, version: str = VERSION) -> dict[str, Any]:
        require_model(model, version)
        return {"name": model, **await ready()}

    @app.get("/v2/models/{model}")
    @app.get("/v2/models/{model}/versions/{version}")
    async def model_metadata(model: str, version: str = VERSION) -> dict[str, Any]:
        require_model(model, version)
        view = service.adapter.engine.view
        height, width = view.image_size or (-1, -1)
        classes = len(served.labels)
        shapes = {"logits": [-1, classes], "class": [-1], "label": [-1]}
        return {
            "name": model,
            "versions": [VERSION],
            "platform": "acclimate",
            "inputs": [{"name": protocol.NAME, "datatype": "FP32", "shape": [-1, 3, height, width]}],
            "outputs": [
                {"name": name, "datatype": datatype, "shape": shapes[name]} for name, datatype in protocol.OUTPUTS.items()
            ],
            "parameters": {"method": service.adapter.method.name, "input_files": "the input may also be BYTES [-1]"},
        }

    @app.post("/v2/models/{model}/infer")
    @app.post("/v2/models/{model}/versions/{version}/infer")
    async def infer(request: Request, model: str, version: str = VERSION) -> Response:
        require_model(model, version)
        start = time.perf_counter()
        try:
            async with served.bodies.of(request) as content:
                asked, images = await read(request, content)
                stream = asked.sequence.id or UNNAMED
                job = Job(stream, images, asked.sequence.start, asked.sequence.end)
                service.submit(job)
                logits, facts = await asyncio.wrap_future(job.reply)
        except Exception as error:
            raise as_http(error) from error
        body, headers = protocol.response(
            asked, model, version, logits.float().cpu().numpy(), served.labels, {**facts, "stream": stream}
        )
        service.metrics.latency.observe(time.perf_counter() - start)
        return Response(body, headers=headers)

    async def read(request: Request, body: bytes) -> tuple[InferRequest, torch.Tensor]:
        """Return a request, and its images as the model takes them."""
        address = protocol.stream_in_address(request.query_params)
        async with decoders:
            if request.headers.get("content-type", "").startswith("image/"):
                asked = InferRequest("", StreamName(), files=[body], outputs=dict.fromkeys(protocol.OUTPUTS, False))
            else:
                asked = await asyncio.to_thread(protocol.parse, body, request.headers.get(HEADER))
            asked = replace(asked, sequence=asked.sequence.or_from(address))
            return asked, await asyncio.to_thread(prepared, asked)

    def prepared(asked: InferRequest) -> torch.Tensor:
        images = torch.cat(decoded(asked.files)) if asked.pixels is None else torch.from_numpy(asked.pixels.copy())
        view = service.adapter.engine.view
        return view.check(images.to(view.device))

    def decoded(files: Sequence[bytes]) -> list[torch.Tensor]:
        most = LARGEST * most_pixels()
        if sum(of_each(files, count_pixels)) > most:  # before any of them is decoded
            raise InputError(f"The files of the request have more than {most:.0f} pixels in all.")
        preprocess = served.preprocess
        return of_each(files, lambda file: preprocess.normalised(preprocess(decode_image(file))[None].copy()))

    def of_each(files: Sequence[bytes], call: Callable[[bytes], T]) -> list[T]:
        found = []
        for i, file in enumerate(files, 1):
            try:
                found.append(call(file))
            except InputError as error:
                raise InputError(f"File {i} of {len(files)}: {error}.") from error
        return found

    # ---- streams ----------------------------------------------------------------------------------------------

    def require_token(request: Request) -> None:
        if served.open_admin:
            return
        if served.token is None:
            raise HTTPException(403, "This server has no token, so that its streams cannot be changed.")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), served.token.encode()):
            wrong = "The token is missing or wrong. It is sent as Authorization: Bearer TOKEN."
            raise HTTPException(401, wrong, {"WWW-Authenticate": "Bearer"})

    async def controlled(call: Callable[[], Any]) -> Any:
        try:
            return await asyncio.wrap_future(service.control(call))
        except Exception as error:
            raise as_http(error) from error

    async def with_known(name: str, call: Callable[[str], Any]) -> Any:
        """Call a function with the name of a stream, which it does not create if a request before has removed it."""

        def checked() -> Any:
            if not service.streams.has(name):
                raise HTTPException(404, f"There is no stream {name!r}.")
            return call(name)

        return await controlled(checked)

    @app.get("/streams")
    async def all_streams() -> dict[str, Any]:
        known = list(service.streams.known.values())
        return {
            "model": served.name,
            "method": service.adapter.method.name,
            "waiting": service.waiting,
            "admin": "open" if served.open_admin else "closed" if served.token is None else "token",
            "all": len(service.streams),
            "demo": bool(getattr(app.state, "demo", False)),
            "streams": [stream.summary() for stream in known],
            "recent": await asyncio.to_thread(pictures),
        }

    def pictures() -> list[dict[str, Any]]:
        found = []
        for each in list(service.recent):
            normalised = service.adapter.engine.to_pixels(each.image[None])[0]
            pixels = (255 * normalised.clamp(0, 1)).round().byte().permute(1, 2, 0).cpu().numpy()
            file = io.BytesIO()
            Image.fromarray(pixels).resize((96, 96)).save(file, "PNG")
            found.append(
                {
                    "stream": each.stream,
                    "image": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(),
                    "source": served.labels[each.source],
                    "adapted": served.labels[each.adapted],
                    "truth": None if each.truth is None else served.labels[each.truth],
                }
            )
        return found

    @app.post("/streams/{name:path}/{action}")
    async def change(request: Request, name: str, action: str) -> dict[str, Any]:
        require_token(request)
        actions = {
            "reset": service.streams.reset,
            "rollback": service.streams.rollback,
            "snapshot": service.streams.take_snapshot,
            "freeze": lambda name: service.streams.freeze(name, True),
            "thaw": lambda name: service.streams.freeze(name, False),
        }
        if action not in actions:
            raise HTTPException(404, f"There is no action {action!r}: there are {', '.join(actions)}.")
        await with_known(name, actions[action])
        log("changed", stream=name, action=action)
        return {"stream": name, "action": action}

    @app.get("/streams/{name:path}/state")
    async def download(request: Request, name: str) -> Response:
        require_token(request)
        content = await with_known(name, service.streams.content)
        return Response(content, media_type="application/octet-stream")

    @app.put("/streams/{name:path}/state")
    async def upload(request: Request, name: str) -> dict[str, Any]:
        require_token(request)
        try:
            protocol.require_stream(name)
        except InputError as error:
            raise as_http(error) from error
        async with served.bodies.of(request) as content:
            await controlled(lambda: service.streams.replace(name, content))
        log("uploaded", stream=name)
        return {"stream": name}

    @app.delete("/streams/{name:path}/state")
    async def delete(request: Request, name: str) -> dict[str, Any]:
        require_token(request)
        await with_known(name, service.streams.remove)
        log("removed", stream=name)
        return {"stream": name}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4")

    # ---- the page ---------------------------------------------------------------------------------------------

    def add_page(path: str, file: str, kind: str) -> None:
        content = resources.files(__package__).joinpath(file).read_bytes()
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}

        @app.get(path)
        async def page() -> Response:
            return Response(content, media_type=kind, headers=headers)

    for path, (file, kind) in PAGE.items():
        add_page(path, file, kind)
    return app


def as_http(error: Exception) -> HTTPException:
    """Return an error as a response of the protocol: a fault of the request, or a refusal for now."""
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, Refused):
        return HTTPException(error.code, str(error), {"Retry-After": str(error.retry_after)})
    if isinstance(error, TooManyStreams):
        return HTTPException(429, str(error), {"Retry-After": "60"})
    if isinstance(error, StateError):
        return HTTPException(409, str(error))
    if isinstance(error, AcclimateError):
        return HTTPException(400, str(error))
    log("error", error=f"{type(error).__name__}: {error}")
    return HTTPException(500, "The server failed. Its log says why.")
