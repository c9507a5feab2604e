"""What stands before the app: names for requests, the key, and bodies of bounded size. Plain ASGI: what wraps a
response would hide that its reader has gone."""

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
    """Gives x-request-id back, or makes one, and notes when the request came. `on_status` is told how it was
    answered."""

    def __init__(self, app: ASGIApp, on_status: Callable[[int], None]) -> None:
        self.app, self.on_status = app, on_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else uuid4().hex
        scope.setdefault("state", {}).update(request_id=name, arrived=perf_counter())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
                self.on_status(message["status"])
            await send(message)

        await self.app(scope, receive, named)


class Key:
    """Refuses who does not know the key, where there is one. The time that takes says nothing about the key."""

    def __init__(self, app: ASGIApp, key: str, open_paths: frozenset[str]) -> None:
        self.app, self.open_paths = app, open_paths
        self._known = sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.open_paths:
            given = Headers(scope=scope).get("authorization", "")
            kind, _, key = given.partition(" ")
            found = sha256(key.strip().encode("latin-1", "replace")).digest()
            right = hmac.compare_digest(found, self._known)
            if not right or kind.lower() != "bearer":
                return await ApiError(401, "a valid API key is needed").response()(scope, receive, send)
        await self.app(scope, receive, send)


class Bodies:
    """Reads a body to its end before the app is called. Refuses those that are too large or take too long."""

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self.app, self.limit, self.seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            body = await self._read(Headers(scope=scope).get("content-length", ""), receive)
        except ApiError as error:
            response = error.response()
            response.headers["Connection"] = "close"  # the rest of the body is not read
            return await response(scope, receive, send)
        if body is None:
            return
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, again, send)

    async def _read(self, length: str, receive: Receive) -> bytes | None:
        """The body; None where its sender has gone."""
        too_large = ApiError(413, f"a body may have {self.limit} bytes")
        if length.isdecimal() and (len(length) > 18 or int(length) > self.limit):
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not end within {self.seconds:g} seconds") from None
