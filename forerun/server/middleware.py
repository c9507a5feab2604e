"""Plain ASGI middleware: ids of requests, the key, and bodies of bounded size. Middleware that wraps responses, as
`@app.middleware("http")` does, would hide that a reader has gone."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from hashlib import sha256
from time import perf_counter
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.errors import ApiError


class RequestIds:
    """Reads x-request-id, or makes one, `sends` it back, and notes when the request came. `on_status` gets each
    status."""

    def __init__(self, app: ASGIApp, on_status: Callable[[int], None], sends: bool) -> None:
        self.app, self.on_status, self.sends = app, on_status, sends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        name = (
            given
            if 0 < len(given) <= 128 and given.isascii() and given.isprintable()
            else uuid4().hex
        )
        scope.setdefault("state", {}).update(request_id=name, arrived=perf_counter())

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                if self.sends:
                    MutableHeaders(scope=message)["x-request-id"] = name
                self.on_status(message["status"])
            await send(message)

        await self.app(scope, receive, send_named)


class ApiKey:
    """Refuses requests without the key. The time that takes says nothing about the key."""

    def __init__(self, app: ASGIApp, key: str, open_paths: frozenset[str]) -> None:
        self.app, self.open_paths = app, open_paths
        self._digest = sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.open_paths:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            digest = sha256(key.strip().encode("latin-1", "replace")).digest()
            if not hmac.compare_digest(digest, self._digest) or scheme.lower() != "bearer":
                return await ApiError(401, "a valid API key is needed").response()(
                    scope, receive, send
                )
        await self.app(scope, receive, send)


class BodyLimit:
    """Reads a body to its end before the app is called. Refuses bodies that are too large or take too long."""

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self.app, self.limit, self.seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._read(Headers(scope=scope).get("content-length", ""), receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not end within {self.seconds:g} seconds")
            return await error.response(Connection="close")(scope, receive, send)
        except ApiError as error:  # the rest of the body is not read
            return await error.response(Connection="close")(scope, receive, send)
        if body is None:
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_body, send)

    async def _read(self, length: str, receive: Receive) -> bytes | None:
        body, more = bytearray(), True
        while (
            more
            and len(body) <= self.limit
            and not (length.isdecimal() and int(length[:18]) > self.limit)
        ):
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if more or len(body) > self.limit:
            raise ApiError(413, f"a body may have {self.limit} bytes")
        return bytes(body)
