"""The demonstration: the bundled images pass through fog, frost and noise, and two models predict them side by side."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request
from torch import nn

from ..data import bundled
from ..data.corruptions import corrupt
from ..data.domains import Images
from ..errors import InputError, require_whole
from .application import as_http
from .limits import Bodies
from .protocol import json_object
from .service import Job, Recent, Service, log

STREAM = "demo"
WEATHER = {"fog": "fog", "frost": "frost", "noise": "gaussian_noise"}  # by the name of a slider
POINTS = 200  # batches in the curves


class Demo:
    """A stream of the bundled images at a steady rate, and the accuracies of both models.

    Args:
        service: The service, with an adapter of the bundled model.
        source: The source model.
        batch: Images in a batch.
        pause: Seconds between two batches.
    """

    def __init__(self, service: Service, source: nn.Module, *, batch: int = 32, pause: float = 0.5) -> None:
        self._service, self._source, self._batch, self._pause = service, source.eval(), batch, pause
        self._images: Images = bundled.images()
        self._weather = dict.fromkeys(WEATHER, 0)
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self._random = np.random.default_rng(0)
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="demo-stream", daemon=True)

    def start(self) -> None:
        """Start the stream. It ends with the service."""
        self._thread.start()

    def set(self, weather: Mapping[str, Any]) -> None:
        """Set the severities, from 0 to 5, of some of fog, frost and noise."""
        unknown = [name for name in weather if name not in WEATHER]
        if unknown:
            raise InputError(f"There is no {unknown[0][:20]!r}: there are {', '.join(WEATHER)}.")
        try:
            require_whole(0, 5, **weather)
        except ValueError as error:
            raise InputError(str(error)) from None
        self._weather = {**self._weather, **weather}

    def state(self) -> dict[str, Any]:
        """Return the severities, and the numbers of images that both models predicted correctly in the latest batches."""
        return {"weather": self._weather, "batch": self._batch, "points": list(self._points)}

    def step(self) -> None:
        """Draw a batch, corrupt it, and let both models predict it."""
        weather = self._weather
        chosen = self._random.integers(len(self._images.labels), size=self._batch)
        pixels = self._images.pixels[chosen]
        for name, corruption in WEATHER.items():
            if weather[name]:
                pixels = corrupt(pixels, corruption, weather[name], seed=self._count, constants="cifar-10-c")
        images, labels = bundled.PREPROCESS.normalised(pixels), torch.from_numpy(self._images.labels[chosen])
        job = Job(STREAM, images)
        self._service.submit(job)
        with torch.no_grad():
            source = self._source(images)
        logits, _ = job.reply.result()
        right = {
            name: int((each.argmax(-1) == labels).sum()) for name, each in (("source", source), ("adapted", logits.cpu()))
        }
        latest = Recent(STREAM, images[0], int(source[0].argmax()), int(logits[0].argmax()), int(labels[0]))
        self._service.recent.append(latest)
        self._count += 1
        self._points.append({"batch": self._count, **right, **weather})

    def _run(self) -> None:
        while True:
            start = time.monotonic()
            try:
                self.step()
            except Exception as error:  # for example a batch that waited for too long: the next one may not
                if not self._service.is_alive:
                    return
                log("error", error=f"{type(error).__name__}: {error}")
            time.sleep(max(0.05, self._pause - (time.monotonic() - start)))


def add_demo(app: FastAPI, demo: Demo) -> None:
    """Add the paths of the demonstration to an application."""
    app.state.demo = True
    bodies = Bodies(most_bytes=1000)

    @app.get("/demo")
    async def state() -> dict[str, Any]:
        return demo.state()

    @app.post("/demo")
    async def change(request: Request) -> dict[str, Any]:
        try:
            async with bodies.of(request) as body:
                demo.set(json_object(body))
        except InputError as error:
            raise as_http(error) from error
        return demo.state()
