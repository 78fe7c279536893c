"""What clients may take from the server: bytes of memory, and connections."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import Request
from starlette.exceptions import HTTPException

from acclimate.serve.limits import Bodies, idle_closer, with_room


def request(*parts: bytes, whole: bool = True) -> Request:
    """Return a request whose body arrives in parts, without a length."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b""} if whole else {"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def test_the_bodies_of_all_requests_have_a_limit():
    bodies = Bodies(most_bytes=10, most_in_all=15)

    async def refused(*parts: bytes, **options: bool) -> HTTPException:
        with pytest.raises(HTTPException) as error:
            async with bodies.of(request(*parts, **options)):
                raise AssertionError("it was taken")
        return error.value

    async def ask() -> None:
        async with bodies.of(request(b"12345", b"67890")) as body:
            assert body == b"1234567890"
            many = await refused(b"12345", b"6")
            assert many.status_code == 429 and many.headers is not None and int(many.headers["Retry-After"]) >= 1
            assert bodies.in_all == 10, "a request that was refused counts no more"
            async with bodies.of(request(b"12345")) as other:
                assert other == b"12345" and bodies.in_all == 15
            assert (await refused(b"123", whole=False)).status_code == 400
        assert (await refused(b"12345", b"678901")).status_code == 413
        assert bodies.in_all == 0

    asyncio.run(ask())


def test_connections_without_a_request_are_closed():
    new, _ended, other, busy, slow, stuck = connections = [Mock() for _ in range(6)]
    for connection in connections:
        connection.transport.get_write_buffer_size.return_value = 7 if connection in (slow, stuck) else 0
    new.cycle, busy.cycle.response_complete = None, False
    close_idle = idle_closer({*connections})

    def closed() -> list[bool]:
        asyncio.run(close_idle())
        return [connection.transport.abort.called for connection in connections]

    assert not any(closed())
    other.cycle = Mock()  # a request has come meanwhile
    busy.cycle.response_complete = True
    slow.transport.get_write_buffer_size.return_value = 6  # its client has read some of the reply
    assert closed() == [True, True, False, False, False, True]
    assert all(closed())


def test_a_server_with_too_many_connections_refuses_in_the_form_of_the_protocol():
    full, sent = [True], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    ask = with_room(app, lambda: full[0])
    for kind in ("http", "lifespan"):
        asyncio.run(ask({"type": kind}, None, send))
    full[0] = False
    asyncio.run(ask({"type": "http"}, None, send))
    assert [message["status"] for message in sent if "status" in message] == [503, 200, 200]
    headers = dict(sent[0]["headers"])
    assert headers[b"retry-after"] == b"1" and headers[b"connection"] == b"close"
    assert "too many connections" in json.loads(sent[1]["body"])["error"]
