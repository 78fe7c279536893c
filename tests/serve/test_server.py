"""The server as its clients see it: tritonclient, curl and plain requests against a real process on this machine."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import acclimate
from acclimate import cli
from acclimate.serve.application import Served, application, as_http
from acclimate.serve.opening import open_adapter
from acclimate.serve.service import JsonLines, Refused, Service
from acclimate.serve.streams import Streams, TooManyStreams
from support import child_environment, trials

TOKEN = "a-token-of-this-test"
WHERE = "/v2/models/bundled/infer"


class Server:
    """A process of `acclimate serve`, and requests to it."""

    def __init__(self, process: subprocess.Popen[str], port: int, secure: ssl.SSLContext | None = None) -> None:
        self.process, self.port, self.secure = process, port, secure

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, http.client.HTTPMessage]:
        if self.secure is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        else:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.secure)
        content = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        connection.request(method, path, content, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        try:
            return answer.status, json.loads(content), answer.headers
        except ValueError:
            return answer.status, content, answer.headers

    def infer(self, images: np.ndarray, stream: str | int = 0) -> dict[str, Any]:
        only = {"name": "images", "datatype": "FP32", "shape": list(images.shape), "data": images.ravel().tolist()}
        code, told, _ = self.ask("POST", WHERE, {"inputs": [only], "parameters": {"sequence_id": stream}})
        assert code == 200, told
        return {output["name"]: output["data"] for output in told["outputs"]} | told["parameters"]

    def steps(self, stream: str, expected: int) -> int:
        """Return the number of steps of a stream, the last of which may still run behind its reply."""
        steps, until = -1, time.monotonic() + 10
        while steps != expected and time.monotonic() < until:
            streams = self.ask("GET", "/streams")[1]["streams"]
            steps = next((each["steps"] for each in streams if each["name"] == stream), -1)
        return steps


@contextmanager
def running(folder: Path, *arguments: str, secure: ssl.SSLContext | None = None) -> Iterator[Server]:
    (folder / "token").write_text(TOKEN)
    command = [sys.executable, "-m", "acclimate", "serve", "--model", "bundled", "--method", "tent", "--port", "0"]
    command += ["--states", str(folder / "states"), "--auth-token-file", str(folder / "token"), *arguments]
    with open(folder / "log", "a") as log:
        process = subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r":(\d+)/", line)
        assert found, (line, (folder / "log").read_text())
        server = Server(process, int(found[1]), secure)
        assert server.ask("GET", "/v2/health/ready")[0] == 200
        yield server
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    pixels = acclimate.bundled.images().pixels[:4]
    return acclimate.bundled.PREPROCESS.normalised(pixels).numpy()


def png(index: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(acclimate.bundled.images().pixels[index]).save(file, "PNG")
    return file.getvalue()


def test_health_and_metadata(server):
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/bundled/ready", "/v2/models/bundled/versions/1/ready"):
        assert server.ask("GET", path)[0] == 200
    assert server.ask("GET", "/v2")[1]["name"] == "acclimate"
    model = server.ask("GET", "/v2/models/bundled")[1]
    assert model["inputs"][0]["shape"] == [-1, 3, 28, 28] and model["outputs"][0]["shape"] == [-1, 10]
    for path in ("/v2/models/other", "/v2/models/bundled/versions/2", "/nothing"):
        code, told, _ = server.ask("GET", path)
        assert code == 404 and isinstance(told["error"], str)


def test_streams_adapt_apart_as_an_adapter_would(server, images):
    alone = acclimate.adapt(acclimate.bundled.model(), "tent", mean=(0.5,) * 3, std=(0.5,) * 3)
    for _ in range(3):
        expected = alone(torch.from_numpy(images)).numpy()
        for stream in ("one", "two"):
            told = server.infer(images, stream)
            np.testing.assert_allclose(np.reshape(told["logits"], (4, 10)), expected, atol=1e-4)
            assert told["learned"] and told["stream"] == stream
            assert told["label"] == [acclimate.bundled.CLASSES[each] for each in told["class"]]
    assert server.steps("one", 3) == server.steps("two", 3) == 3


def test_the_stream_of_a_request_is_named_in_its_body_or_its_address(server, images):
    only = {"name": "images", "datatype": "FP32", "shape": list(images.shape), "data": images.ravel().tolist()}
    for about, stream in (({}, "address"), ({"parameters": {"sequence_id": "body"}}, "body")):
        code, told, _ = server.ask("POST", f"{WHERE}?sequence_id=address", {"inputs": [only], **about})
        assert code == 200 and told["parameters"]["stream"] == stream


def test_a_stream_starts_and_ends_as_its_address_or_its_body_says(server, images):
    only = {"name": "images", "datatype": "FP32", "shape": list(images.shape), "data": images.ravel().tolist()}
    kind = {"Content_Type": "image/png"}
    asked = [
        ("start=true", {"inputs": [only]}, {}),
        ("start=True", png(), kind),
        ("start=false", {"inputs": [only], "parameters": {"sequence_start": True}}, {}),
    ]
    for i, (flag, body, headers) in enumerate(asked):
        server.infer(images, f"address-{i}"), server.infer(images, f"address-{i}")
        assert server.steps(f"address-{i}", 2) == 2
        code, told, _ = server.ask("POST", f"{WHERE}?sequence_id=address-{i}&sequence_{flag}", body, **headers)
        assert code == 200 and server.steps(f"address-{i}", 1) == 1, told
    assert server.ask("POST", f"{WHERE}?sequence_id=address-0&sequence_end=true", png(), **kind)[0] == 200
    assert server.ask("GET", "/streams/address-0/state", Authorization=f"Bearer {TOKEN}")[0] == 404
    for where, about in (("?sequence_start=true", {}), ("", {"sequence_id": 0, "sequence_end": True})):
        code, told, _ = server.ask("POST", f"{WHERE}{where}", {"inputs": [only], "parameters": about})
        assert code == 400 and "need a sequence_id" in told["error"]
    code, told, _ = server.ask("POST", f"{WHERE}?sequence_id=a&sequence_start=yes", {"inputs": [only]})
    assert code == 400 and "sequence_start is true or false, not 'yes'" in told["error"]


def test_an_error_that_nobody_expects_is_counted():
    adapter, preprocess, labels = open_adapter("bundled", "source", device="cpu")
    service = Service(Streams(adapter))
    service.streams.known["broken"] = None
    app, sent = application(service, Served("bundled", preprocess, labels)), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/streams", "query_string": b"", "headers": []}
    with pytest.raises(AttributeError):  # for the log of uvicorn
        asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 500 and json.loads(sent[1]["body"])["error"] == "The server failed. Its log says why."
    assert service.metrics.registry.get_sample_value("acclimate_requests_total", {"code": "500"}) == 1
    del service.streams.known["broken"]
    service.close()


def test_a_stream_that_is_removed_does_not_come_back_with_a_request_that_waits():
    adapter, preprocess, labels = open_adapter("bundled", "source", device="cpu")
    service = Service(Streams(adapter), show=False)
    app, go = application(service, Served("bundled", preprocess, labels, TOKEN)), threading.Event()
    service.control(lambda: service.streams.get("a")).result(30)
    service.control(go.wait)

    async def status(method: str, path: str) -> int:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"authorization", f"bearer {TOKEN}".encode())]
        await app({"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}, receive, send)
        return sent[0]["status"]

    async def ask() -> list[int]:
        asked = []
        for request in (("DELETE", "/streams/a/state"), ("GET", "/streams/a/state"), ("POST", "/streams/a/reset")):
            asked.append(asyncio.create_task(status(*request)))
            while len(service._controls) < len(asked):
                await asyncio.sleep(0.01)
        go.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(asyncio.wait_for(ask(), 30)) == [200, 404, 404]
    assert not service.streams.has("a")
    service.close()


def test_tritonclient(server, images):
    triton = pytest.importorskip("tritonclient.http")
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("bundled")
        assert client.get_model_metadata("bundled", "1")["platform"] == "acclimate"
        for binary in (True, False):
            given = triton.InferInput("images", list(images.shape), "FP32")
            given.set_data_from_numpy(images, binary_data=binary)
            wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("logits", "class", "label")]
            answer = client.infer("bundled", [given], outputs=wanted, sequence_id=17, sequence_start=True)
            logits, labels = answer.as_numpy("logits"), answer.as_numpy("label")
            assert logits.shape == (4, 10) and (answer.as_numpy("class") == logits.argmax(-1)).all()
            names = [each.decode() if isinstance(each, bytes) else each for each in labels.tolist()]
            assert names == [acclimate.bundled.CLASSES[each] for each in logits.argmax(-1)]
        files = triton.InferInput("images", [2], "BYTES")
        files.set_data_from_numpy(np.array([png(0), png(1)], dtype=np.object_))
        answer = client.infer("bundled", [files], sequence_id=18, sequence_start=True)
        np.testing.assert_allclose(answer.as_numpy("logits"), logits[:2], atol=1e-4)
        with pytest.raises(triton.InferenceServerException, match="its name has to be"):
            client.infer("bundled", [triton.InferInput("other", [1], "BYTES").set_data_from_numpy(np.array([b""], object))])


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
def test_curl(server, tmp_path):
    (tmp_path / "boot.png").write_bytes(png())
    address = f"http://127.0.0.1:{server.port}"
    file = ["--data-binary", f"@{tmp_path / 'boot.png'}", "-H", "Content-Type: image/png"]
    done = subprocess.run(
        ["curl", "-sS", *file, f"{address}{WHERE}?sequence_id=curl"], capture_output=True, check=True, timeout=60
    )
    outputs = {output["name"]: output["data"] for output in json.loads(done.stdout)["outputs"]}
    assert outputs["label"] == ["ankle boot"]
    done = subprocess.run(["curl", "-sS", f"{address}/metrics"], capture_output=True, check=True, text=True, timeout=60)
    assert 'acclimate_requests_total{code="200"}' in done.stdout and "acclimate_steps_total" in done.stdout


def test_wrong_requests_get_a_4xx_and_change_no_state(server, images):
    token = {"Authorization": f"Bearer {TOKEN}"}
    server.infer(images, "careful")
    assert server.steps("careful", 1) == 1
    before = server.ask("GET", "/streams/careful/state", **token)[1]
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG")
    small = {"inputs": [{"name": "images", "datatype": "FP32", "shape": [1, 3, 5, 5], "data": [0.0] * 75}]}
    asked = [
        (400, small, {}),
        (400, b"{", {}),
        (400, b"{}", {"Inference_Header_Content_Length": "7"}),
        (400, png()[:100], {"Content_Type": "image/png"}),
        (400, bomb.getvalue(), {"Content_Type": "image/png"}),
        (400, b"<svg/>", {"Content_Type": "image/svg+xml"}),
        (400, {"inputs": [{"name": "images", "datatype": "FP32", "shape": [1] * 99, "data": [0.0]}]}, {}),
        (400, {"inputs": [{**small["inputs"][0], "parameters": {"binary_data_size": "\ud800"}}]}, {}),
        (413, b"", {"Content_Length": str(2**40)}),
        (415, b"x", {"Content_Encoding": "gzip"}),
    ]
    for code, body, headers in asked:
        found, told, _ = server.ask("POST", f"{WHERE}?sequence_id=careful", body, **headers)
        assert found == code and isinstance(told["error"], str), (code, found, told)
    files = [base64.b64encode(file).decode() for file in (png(), b"no image")]
    two = {"inputs": [{"name": "images", "datatype": "BYTES", "shape": [2], "data": files}]}
    code, told, _ = server.ask("POST", f"{WHERE}?sequence_id=careful", two)
    assert code == 400 and told["error"].startswith("File 2 of 2: the image cannot be read")
    large = io.BytesIO()
    Image.new("1", (9400, 9400)).save(large, "PNG")
    files = [base64.b64encode(large.getvalue()).decode()] * 5
    many = {"inputs": [{"name": "images", "datatype": "BYTES", "shape": [5], "data": files}]}
    code, told, _ = server.ask("POST", f"{WHERE}?sequence_id=careful", many)
    assert code == 400 and told["error"] == "The files of the request have more than 357913940 pixels in all."
    assert server.steps("careful", 1) == 1
    assert server.ask("GET", "/streams/careful/state", **token)[1] == before
    assert server.ask("GET", WHERE)[0] == 405
    assert 'code="500"' not in server.ask("GET", "/metrics")[1].decode()


def test_images_that_no_model_can_predict_are_refused(server, images):
    noise = 1e30 * np.random.default_rng(0).standard_normal(images.shape)
    only = {"name": "images", "datatype": "FP32", "shape": list(images.shape), "data": noise.ravel().tolist()}
    code, told, _ = server.ask("POST", f"{WHERE}?sequence_id=noise", {"inputs": [only]})
    assert code == 400 and "logits of these images are not finite" in told["error"]
    assert server.infer(images, "noise")["learned"] and server.steps("noise", 2) == 2
    shown = next(each for each in server.ask("GET", "/streams")[1]["streams"] if each["name"] == "noise")
    assert [each["entropy"] is None for each in shown["history"]] == [True, False] and "not finite" in shown["events"][0]
    for flag, steps in (("start", 2), ("end", 3)):  # a batch whose step is undone counts as one
        assert server.ask("POST", f"{WHERE}?sequence_id=noise&sequence_{flag}=true", {"inputs": [only]})[0] == 400
        assert server.steps("noise", steps) == steps


def test_malformed_requests_get_a_400_and_change_no_state(server, images):
    """ACCLIMATE_FUZZ=34 sends ten thousand."""
    token, rng = {"Authorization": f"Bearer {TOKEN}"}, random.Random(0)
    server.infer(images, "calm")
    assert server.steps("calm", 1) == 1
    before = server.ask("GET", "/streams/calm/state", **token)[1]
    values = [None, True, -1, 2**70, 10**4200, float("nan"), "x", "\ud800", [], [[]], {"a": []}, ["a", 1], [1] * 99]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for _ in range(trials(300)):
        only = {"name": "images", "datatype": "FP32", "shape": [1, 3, 2, 2], "data": [0.0] * 12}  # too small for the model
        request = {"inputs": [only], "outputs": [{"name": "class"}], "parameters": {"sequence_id": "calm"}}
        where = rng.choice([request, only])
        where[rng.choice([*where])] = rng.choice(values)
        content = rng.randbytes(rng.choice([0, 47, 48]))
        only.update(rng.choice([{}, {"parameters": {"binary_data_size": len(content)}}]))
        text = json.dumps(request).encode()
        body, kind = rng.choice([(text + content, "application/json"), (png()[: rng.randrange(60)], "image/png")])
        headers = {"Content-Type": kind, "Inference-Header-Content-Length": rng.choice([str(len(text)), "-1", "9" * 5000])}
        connection.request("POST", f"{WHERE}?sequence_id=calm", body, headers)
        answer = connection.getresponse()
        assert answer.status == 400 and isinstance(json.loads(answer.read())["error"], str), (body[:500], headers)
    connection.close()
    assert server.ask("GET", "/streams/calm/state", **token)[1] == before


def test_clients_that_leave_harm_nobody(server, images):
    only = {"name": "images", "datatype": "FP32", "shape": list(images.shape), "data": images.ravel().tolist()}
    body = json.dumps({"inputs": [only], "parameters": {"sequence_id": "gone"}}).encode()
    start = f"POST {WHERE} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for sent in (start, start + body[:-1], start + body) * 5:
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.sendall(sent)
    assert server.infer(images, "patient")["learned"] and server.steps("patient", 1) == 1
    assert 'code="500"' not in server.ask("GET", "/metrics")[1].decode()


def test_a_large_request_is_refused_while_others_fill_the_memory(tmp_path, images):
    only = {"name": "images", "datatype": "FP32", "shape": list(images.shape), "data": images.ravel().tolist()}
    body = json.dumps({"inputs": [only], "parameters": {"sequence_id": "large"}}).encode()
    most = str(len(body) + 1000)
    with running(tmp_path, "--max-body", most, "--max-bodies", most) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as other:
            other.sendall(f"POST {WHERE} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            other.sendall(body[:-1])
            code, until = 400, time.monotonic() + 20
            while code == 400 and time.monotonic() < until:  # the other request has not arrived yet
                code, told, headers = server.ask(
                    "POST", WHERE, iter([b" " * 1000, body[:-1]])
                )  # in chunks, without a length
            assert code == 429 and "too many large requests" in told["error"] and headers["Retry-After"] == "1"
            assert server.ask("GET", "/v2/health/ready")[0] == 200
            other.sendall(body[-1:])
            assert b" 200 OK" in other.recv(1000)
        assert server.infer(images, "large")["learned"] and server.steps("large", 2) == 2
        assert [each["name"] for each in server.ask("GET", "/streams")[1]["streams"]] == ["large"]


def test_a_photograph_is_turned_upright(server):
    pixels = Image.fromarray(acclimate.bundled.images().pixels[0]).resize((280, 280))
    turned, labels = Image.Exif(), []
    turned[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise to show it
    for image, exif in ((pixels, None), (pixels.rotate(90), turned)):
        file = io.BytesIO()
        image.save(file, "JPEG", quality=95, **({} if exif is None else {"exif": exif}))
        told = server.ask("POST", f"{WHERE}?sequence_id=photo", file.getvalue(), Content_Type="image/jpeg")[1]
        labels.append(told["outputs"][2]["data"])
    assert labels == [["ankle boot"]] * 2


def test_an_address_in_use_is_named(server, capfd):
    for command in (["serve", "--model", "bundled"], ["demo"]):
        assert cli.main([*command, "--port", str(server.port)]) == 2
        assert f"--port {server.port} cannot be used: Address already in use." in capfd.readouterr().err


def test_the_log_has_one_json_object_in_a_line():
    form, told = JsonLines(), logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "two\nlines", (), None)
    assert json.loads(form.format(told))["told"] == "two\nlines" and "\n" not in form.format(told)
    try:
        raise ValueError("reason")
    except ValueError:
        failed = logging.LogRecord("asyncio", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    assert json.loads(form.format(failed)) | {"time": 0, "told": ""} == {
        "time": 0, "message": "error", "from": "asyncio", "told": "", "error": "ValueError",
    }  # fmt: skip
    assert form.format(logging.LogRecord("acclimate.serve", logging.INFO, "", 0, '{"a": 1}', (), None)) == '{"a": 1}'


def test_streams_are_changed_with_the_token_alone(server, images):
    token = {"Authorization": f"Bearer {TOKEN}"}
    server.infer(images, "admin/ü 1")
    here = "/streams/admin%2F%C3%BC%201"
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert server.ask("POST", f"{here}/reset", **headers)[0] == 401
    assert server.ask("POST", "/streams/unknown/reset", **token)[0] == 404
    assert server.ask("POST", f"{here}/explode", **token)[0] == 404
    assert server.ask("POST", f"{here}/rollback", **token)[0] == 409
    code, state, _ = server.ask("GET", f"{here}/state", **token)
    assert code == 200 and isinstance(state, bytes)
    first = server.infer(images, "admin/ü 1")["logits"]
    assert server.ask("PUT", "/streams/other/state", state, **token)[0] == 200
    assert server.infer(images, "other")["logits"] == first
    assert server.ask("PUT", "/streams/other/state", state[:-1], **token)[0] == 409
    assert server.ask("POST", f"{here}/freeze", **token)[0] == 200
    assert server.infer(images, "admin/ü 1")["reason"] == "frozen"
    assert server.ask("DELETE", f"{here}/state", **token)[0] == 200 and server.ask("GET", f"{here}/state", **token)[0] == 404


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl on this machine")
def test_https_and_a_page_without_images(server, images, tmp_path, capfd):
    server.infer(images, "shown")
    server.ask("GET", "/streams/shown/state", Authorization=f"Bearer {TOKEN}")  # waits for what follows the reply
    assert server.ask("GET", "/streams")[1]["recent"], "a server on this machine alone shows images"
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-addext"]
    subprocess.run(
        [*made, "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    locked = ["openssl", "rsa", "-aes256", "-in", key, "-passout", "pass:word", "-out", str(tmp_path / "locked.pem")]
    subprocess.run(locked, check=True, capture_output=True)
    files = ["--ssl-certfile", certificate, "--ssl-keyfile", str(tmp_path / "locked.pem")]
    assert cli.main(["serve", "--model", "bundled", *files]) == 2
    assert "locked.pem: the key has a password" in capfd.readouterr().err
    secure = ssl.create_default_context(cafile=certificate)
    with running(tmp_path, "--ssl-certfile", certificate, "--ssl-keyfile", key, "--no-images", secure=secure) as other:
        other.infer(images, "private")
        assert other.steps("private", 1) == 1 and other.ask("GET", "/streams")[1]["recent"] == []


def test_a_refusal_says_when_to_try_again():
    refused = as_http(Refused(429, "8 images are waiting already."))
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    assert as_http(TooManyStreams("There are 2 streams already.")).headers["Retry-After"] == "60"


def test_a_server_ends_after_ctrl_c_as_after_a_signal_to_end(tmp_path, images):
    with running(tmp_path) as server:
        server.infer(images, "camera")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
    assert int(acclimate.load(tmp_path / "states" / "camera.safetensors", acclimate.bundled.model()).steps) == 1
    messages = [json.loads(line)["message"] for line in (tmp_path / "log").read_text().splitlines()]
    assert messages == ["started", "draining", "stopped"], "nothing else is told"


def test_a_killed_server_continues_from_a_whole_state(tmp_path, images):
    """kill -9 while states are being written: the next server continues from one of them."""
    with running(tmp_path, "--write-after", "0") as server:
        for _ in range(6):
            server.infer(images, "camera")
        file = tmp_path / "states" / "camera.safetensors"
        until = time.monotonic() + 20
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    steps = int(acclimate.load(file, acclimate.bundled.model()).steps)
    assert 1 <= steps <= 6
    with running(tmp_path) as server:
        server.infer(images, "camera")
        assert server.steps("camera", steps + 1) == steps + 1
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == -signal.SIGTERM  # after a drain, which writes what is not written yet
    assert int(acclimate.load(file, acclimate.bundled.model()).steps) == steps + 1
    messages = [json.loads(line)["message"] for line in (tmp_path / "log").read_text().splitlines()]
    assert messages.count("started") == 2 and messages[-2:] == ["draining", "stopped"]
    assert os.listdir(tmp_path / "states") == ["camera.safetensors"]
