"""Plain ASGI middleware: ids, the API key or the host, limits on bodies, and shorter paths.

Middleware that wraps responses, as `@app.middleware("http")` does, would hide that a client has
disconnected.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable, Collection
from hashlib import sha256
from ipaddress import ip_address
from time import perf_counter
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.errors import ApiError

MAX_REQUEST_ID = 128  # characters of an x-request-id
PRIVATE_NAMES = (".localhost", ".local", ".internal", ".home.arpa")  # no public server knows them


class RequestIds:
    """Gives each request an id, and notes when it came.

    The id is the client's x-request-id, or a new one. It comes back in the same header if `sends`.
    `on_status` is called with the scope of each request and the status of its response.
    """

    def __init__(self, app: ASGIApp, on_status: Callable[[Scope, int], None], sends: bool) -> None:
        self.app = app
        self.on_status = on_status
        self.sends = sends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI asks."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        is_valid = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
        request_id = given if is_valid else uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, arrived=perf_counter())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                if self.sends:
                    MutableHeaders(scope=message)["x-request-id"] = request_id
                self.on_status(scope, message["status"])
            await send(message)

        await self.app(scope, receive, send_with_id)


class ApiKey:
    """Refuses requests without the API key.

    It stands in `Authorization: Bearer KEY`, or in `x-api-key` as Anthropic's clients send it.
    Digests are compared in constant time, so that the time of a refusal says nothing about the key.
    """

    def __init__(self, app: ASGIApp, key: str, open_paths: frozenset[str]) -> None:
        self.app = app
        self.open_paths = open_paths
        self._digest = sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI asks."""
        needs_key = scope["type"] == "http" and scope["path"] not in self.open_paths
        if needs_key and not self._has_key(scope):
            error = ApiError(401, "a valid API key is required")
            await error.response(scope["path"])(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")
        digest = sha256(key.strip().encode("latin-1", "replace")).digest()
        return hmac.compare_digest(digest, self._digest)


class AllowedHosts:
    """Refuses requests for a public name that is not in a list.

    A page of any site may have its own name point to this machine (DNS rebinding), and then asks
    this server under that name as if it were the site's. Addresses, names of one part and names
    that no public server resolves cannot be such a name.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self.app = app
        self.names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI asks."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if not self._is_allowed(host):
            message = f"the host {host[:100]!r} is not allowed; see --allowed-hosts"
            error = ApiError(403, message, code="host_not_allowed")
            await error.response(scope["path"])(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host).lower().rstrip(".")
        if "." not in name or name.endswith(PRIVATE_NAMES) or name in self.names:
            return True
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


class BodyLimit:
    """Reads the whole body before the app is called.

    Refuses bodies of more than `limit` bytes, and those that take more than `seconds` to arrive.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self.app = app
        self.limit = limit
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI asks."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        try:
            body = await self._read_in_time(length, receive)
        except ApiError as error:
            # The connection is closed, because the rest of the body was not read.
            response = error.response(scope["path"], Connection="close")
            await response(scope, receive, send)
            return
        if body is None:
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_body, send)

    async def _read_in_time(self, length: str, receive: Receive) -> bytes | None:
        try:
            async with asyncio.timeout(self.seconds):
                return await self._read(length, receive)
        except TimeoutError:
            message = f"the body did not arrive completely within {self.seconds:g} seconds"
            raise ApiError(408, message) from None

    async def _read(self, length: str, receive: Receive) -> bytes | None:
        """Return the body, or None if the client disconnects before its end.

        Raises ApiError as soon as the body, or the length that its header announces, is too large.
        """
        body = bytearray()
        if length.isdecimal() and int(length[:18]) > self.limit:
            raise self._too_large()
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
            if len(body) > self.limit:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.limit} bytes")


class BasePaths:
    """Takes the paths of OpenAI's API also without /v1, as llama.cpp's server does.

    Clients send these if the URL that they were given ends before /v1.
    """

    paths = frozenset(["/chat/completions", "/completions", "/embeddings", "/models", "/responses"])

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI asks."""
        if scope["type"] == "http" and scope["path"] in self.paths:
            path = f"/v1{scope['path']}"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self.app(scope, receive, send)
