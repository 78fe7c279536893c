"""What clients may take from the server: bytes of memory for the bodies of requests, and connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Set
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

SECONDS = 60  # that a request may take to arrive


class Bodies:
    """The bodies of the requests that are in work.

    Args:
        most_bytes: The largest body of a request.
        most_in_all: The largest sum of all bodies that are in memory.
    """

    def __init__(self, most_bytes: int = 64 * 2**20, most_in_all: int = 512 * 2**20) -> None:
        self.most_bytes, self.most_in_all = most_bytes, most_in_all
        self.in_all = 0  # bytes that are in memory

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body of a request for the block. Its bytes count from their arrival to the end of the block."""
        too_large = HTTPException(413, f"The body of a request has {self.most_bytes} bytes at most.")
        told = request.headers.get("content-length", "0")
        if told.isdigit() and int(told) > self.most_bytes:
            raise too_large
        if "content-encoding" in request.headers:
            raise HTTPException(415, "Compressed requests are not supported.")
        size = 0

        async def whole() -> bytes:
            nonlocal size
            parts = []
            async for part in request.stream():
                size += len(part)
                self.in_all += len(part)
                if size > self.most_bytes:
                    raise too_large
                if self.in_all > self.most_in_all:
                    raise HTTPException(429, "The server has too many large requests at the moment.", {"Retry-After": "1"})
                parts.append(part)
            return b"".join(parts)

        try:
            yield await _arrived(whole())
        finally:
            self.in_all -= size


async def _arrived(body: Coroutine[Any, Any, bytes]) -> bytes:
    """Return a body when it has arrived, and refuse one that does not arrive."""
    try:
        return await asyncio.wait_for(body, SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"The request took more than {SECONDS} seconds to arrive.") from None
    except ClientDisconnect:
        raise HTTPException(400, "The connection was closed before the whole request had arrived.") from None


def with_room(app: ASGIApp, is_full: Callable[[], bool]) -> ASGIApp:
    """Return an application that refuses requests, in the protocol's form, while the server has too many connections."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_full():
            headers = {"Retry-After": "1", "Connection": "close"}
            refusal = JSONResponse({"error": "The server has too many connections at the moment."}, 503, headers)
            await refusal(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


def idle_closer(connections: Set[Any]) -> Callable[[], Awaitable[None]]:
    """Return a function that closes connections on which no request has begun, and no reply has moved, since its last call.

    Clients that send half of a header, or do not read their reply, would otherwise keep their connections forever.

    Args:
        connections: The connections of uvicorn, of which `cycle` is the last request, or None before the first.
    """
    idle: set[tuple[Any, Any, int]] = set()

    async def close_idle() -> None:
        nonlocal idle
        before, idle = idle, set()
        for connection in list(connections):
            request = getattr(connection, "cycle", connection)
            unread = connection.transport.get_write_buffer_size()
            if unread or request is None or getattr(request, "response_complete", False):
                idle.add((connection, request, unread))
        for connection, *_ in before & idle:
            connection.transport.abort()

    return close_idle
