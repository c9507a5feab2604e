"""A batch job on one engine: the server without its socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from starlette.types import ASGIApp, Message

from forerun.api.decoder import Decoder
from forerun.scale.batch_file import BadLine, Line
from forerun.scale.batch_folder import Folder
from forerun.server.app import Settings, create_app
from forerun.server.worker import Worker

_LOG = logging.getLogger("forerun.model.batch")

NO_LIMIT = 10.0**9  # seconds that an answer may take: a batch has no reader who goes away
TRIES = 3  # answers of 500 and more that a line may get


async def _post(app: ASGIApp, url: str, body: bytes) -> tuple[int, str, bytes]:
    """Hand one request to an app, as a web server would; its reader never goes away."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, request_id, parts = 0, "", []

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
    }
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    try:
        await app(scope | {"headers": headers}, receive, send)
    except Exception:
        if not status:
            raise
        _LOG.exception("a line failed")  # as the server's log would say after its 500
    return status, request_id, b"".join(parts)


async def run(
    make: Callable[[], Decoder],
    model: str,
    max_rows: int,
    lines: Iterator[Line | BadLine],
    folder: Folder,
    on_record: Callable[[], object],
) -> float:
    """Answer lines by the server's app, asked without a socket: checks, answers and errors are the server's. Return the
    seconds without loading.

    A line at which the server fails is asked again, alone among such lines: what failed may have been another's. Raises
    what `make` raises, and what ends the engine's thread.

    Args:
        make: loads the decoder in the thread that computes.
        model: its name in answers.
        on_record: called after each line.
    """
    worker, again = Worker(make), asyncio.Lock()
    app = create_app(worker, Settings(model=model, max_seconds=NO_LIMIT))

    async def work() -> None:
        for line in lines:  # all take from the same lines
            if isinstance(line, BadLine):
                folder.refuse(line)
            else:
                found, tries = await _post(app, line.url, line.body), 1
                while found[0] >= 500 and worker.failed is None and tries < TRIES:
                    async with again:
                        found, tries = await _post(app, line.url, line.body), tries + 1
                if worker.failed is not None:
                    raise worker.failed
                if found[0] >= 500:
                    _LOG.error("line %d has no answer: %s", line.number, found[2].decode())
                folder.answer(line, *found)
            on_record()

    async with app.router.lifespan_context(app):
        await worker.until_ready()
        begun = perf_counter()
        # Those that have a row, and some that are read and wait for one.
        tasks = [asyncio.ensure_future(work()) for _ in range(max_rows + min(max_rows, 64))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return perf_counter() - begun
