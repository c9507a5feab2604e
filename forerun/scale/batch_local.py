"""A batch job on one engine: the server without its socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from forerun.api.decoder import Decoder
from forerun.scale.batch_file import BadLine, Line
from forerun.scale.batch_folder import Folder
from forerun.server.app import Settings, create_app
from forerun.server.worker import Worker

_LOG = logging.getLogger("forerun.scale.batch")

NO_LIMIT = 10.0**9  # seconds that an answer may take, because no client of a batch disconnects
MAX_ATTEMPTS = 3  # how often a line is asked while its answers have the status 500 or above
MAX_READ_AHEAD = 64  # lines that are read and wait for a row


class _Response(NamedTuple):
    status: int
    request_id: str
    body: bytes


async def _post(app: ASGIApp, url: str, body: bytes) -> _Response:
    """Hand a request to an app, as a web server would. Its client never disconnects."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0
    request_id = ""
    parts: list[bytes] = []

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"]).get(b"x-request-id", b"").decode("latin-1")
        else:
            parts.append(message.get("body", b""))

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": url,
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    try:
        await app(scope, receive, send)
    except Exception:
        if not status:
            raise
        _LOG.exception("a line failed")  # as the server's log would say after its 500
    return _Response(status, request_id, b"".join(parts))


async def run(
    make: Callable[[], Decoder],
    model: str,
    max_rows: int,
    lines: Iterator[Line | BadLine],
    folder: Folder,
    on_record: Callable[[], object],
) -> float:
    """Answer lines by the server's app, and return the seconds that took, without loading.

    The app is asked without a socket, so checks, answers and errors are the server's. A line at
    which the server fails is asked again, one such line at a time, because another line may have
    been the cause. Raises what `make` raises, and what ends the engine's thread.

    Args:
        make: loads the decoder, in the thread that computes.
        model: the name of the model in answers.
        max_rows: the number of rows of the decoder.
        lines: the lines to answer.
        folder: where the records go.
        on_record: called after each line.
    """
    worker = Worker(make)
    retrying = asyncio.Lock()
    app = create_app(worker, Settings(model=model, max_seconds=NO_LIMIT))

    async def answered(line: Line) -> _Response:
        response = await _post(app, line.url, line.body)
        attempts = 1
        while response.status >= 500 and worker.failed is None and attempts < MAX_ATTEMPTS:
            async with retrying:
                response = await _post(app, line.url, line.body)
            attempts += 1
        if worker.failed is not None:
            raise worker.failed
        return response

    async def work() -> None:
        for line in lines:  # all tasks take from the same iterator
            if isinstance(line, BadLine):
                folder.refuse(line)
            else:
                response = await answered(line)
                if response.status >= 500:
                    _LOG.error("line %d has no answer: %s", line.number, response.body.decode())
                folder.answer(line, *response)
            on_record()

    async with app.router.lifespan_context(app):
        await worker.until_ready()
        started_at = perf_counter()
        count = max_rows + min(max_rows, MAX_READ_AHEAD)
        tasks = [asyncio.ensure_future(work()) for _ in range(count)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return perf_counter() - started_at
