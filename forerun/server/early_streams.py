"""Streams that begin before their model is loaded, so that no client or proxy gives them up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Send

from forerun.server.answers import COMMENT, KEEP_ALIVE
from forerun.server.errors import MESSAGES_PATH
from forerun.server.ollama import CHAT_PATH, GENERATE_PATH, RECORDS
from forerun.server.ollama_answers import record

# Paths whose streams consist of server-sent events and end with [DONE].
_EVENT_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_EVENTS = "text/event-stream"


@dataclass(frozen=True)
class StreamForm:
    """How a stream is written.

    Attributes:
        media_type: its Content-Type.
        idle: a part without content, which keeps it open.
        before_error, after_error: what stands around an error, which is JSON.
    """

    media_type: str
    idle: bytes
    before_error: bytes
    after_error: bytes


def stream_form(path: str, body: dict[str, Any], model: str) -> StreamForm | None:
    """Return the form of the stream that answers a body, or None if its answer comes whole.

    `model` is the name of the model that is asked.
    """
    # Ollama's answers are streams unless the body says otherwise.
    if path in (CHAT_PATH, GENERATE_PATH) and body.get("stream") in (None, True):
        # Clients read a record from every line, so that an empty line would be an error.
        idle = record(model, path == CHAT_PATH, {}, None)
        return StreamForm(RECORDS, idle, b"", b"\n")
    if body.get("stream") is not True:
        return None
    if path == MESSAGES_PATH:  # whose clients ignore events without a name
        return StreamForm(_EVENTS, COMMENT, b"event: error\ndata: ", b"\n\n")
    if path in _EVENT_PATHS:
        return StreamForm(_EVENTS, COMMENT, b"data: ", b"\n\ndata: [DONE]\n\n")
    return None


class EarlyStream:
    """The answer to a request, which may begin as a stream before its model is loaded.

    Attributes:
        has_begun: whether it has begun before.
    """

    def __init__(self, send: Send, form: StreamForm | None) -> None:
        """`form` is None for an answer that comes whole, which begins when the model is loaded."""
        self._send = send
        self._form = form
        self.has_begun = False
        self._is_whole = False
        self._content = b""

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send parts without content while something is waited for for long."""
        is_over = asyncio.Event()
        form = self._form
        task = None if form is None else asyncio.create_task(self._keep_alive(form, is_over))
        try:
            yield
        finally:
            is_over.set()
            if task is not None:
                await task  # it is not cancelled, because it may have sent half of something

    async def _keep_alive(self, form: StreamForm, is_over: asyncio.Event) -> None:
        """Send a part without content now and then until something is over."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEP_ALIVE):
                    await is_over.wait()
                    return
            if not self.has_begun:
                self.has_begun = True
                headers = [
                    (b"content-type", form.media_type.encode()),
                    (b"cache-control", b"no-cache"),
                ]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send_part(form.idle)

    async def _send_part(self, content: bytes, has_more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": has_more})

    async def end(self, error: bytes) -> None:
        """End a stream that has begun with an error, which is JSON."""
        assert self._form is not None
        content = self._form.before_error + error.strip() + self._form.after_error
        await self._send_part(content, has_more=False)

    async def send(self, message: Message) -> None:
        """Send a message of the model's app.

        Where the stream has begun, an error cannot be the response, and becomes the stream's end.
        So does Ollama's whole answer to a request that asks for nothing.
        """
        if self._form is None or not self.has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._is_whole = not kind.startswith(self._form.media_type)
        elif self._is_whole:
            self._content += message.get("body", b"")
            if not message.get("more_body", False):
                await self.end(self._content)
        else:
            await self._send(message)
