"""The process: its connections, its signals, and its end."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import sys
import typing
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.server.errors import ApiError, shutting_down

_LOG = logging.getLogger("forerun.server")

IDLE_SECONDS = 15  # how long a connection may stay open without a request
STALLED_SECONDS = 60.0  # how long a client may read nothing while its buffers are full
FLUSH_SECONDS = 5  # how long the last bytes may take when the server ends
# How soon the engine's thread and the event loop's give way to each other. With Python's default of
# 0.005 seconds each event would wait longer for its turn.
SWITCH_SECONDS = 0.0002


class Protocol(H11Protocol):
    """uvicorn's protocol, which also closes connections that do nothing.

    These are connections without a request, connections whose headers do not end, and those of
    clients that have stopped reading.
    """

    _timer: asyncio.TimerHandle | None = None

    def _abort_after(self, seconds: float | None) -> None:
        """Close the connection after some seconds, or never (None).

        Each call replaces the one before it.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._abort_after(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._abort_after(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read data. Headers that come in parts do not restart the timer."""
        super().data_received(data)
        are_headers_incomplete = (
            self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        )
        if are_headers_incomplete:
            if self._timer is None:
                self._abort_after(self.timeout_keep_alive)
        elif not self.flow.write_paused:
            self._abort_after(None)

    def pause_writing(self) -> None:
        """Begin to wait for a client whose buffers are full."""
        super().pause_writing()
        self._abort_after(STALLED_SECONDS)

    def resume_writing(self) -> None:
        """Stop the timer, because the client reads again."""
        self._abort_after(None)
        super().resume_writing()


class Served(typing.Protocol):
    """What a server of connections knows of the one model that it serves, or of several.

    Attributes:
        draining: whether new requests are refused because the server is about to end.
    """

    draining: bool

    @property
    def open(self) -> int:
        """Return the number of requests that are being answered."""

    @property
    def failed(self) -> BaseException | None:
        """Return what ended decoding for good, or None."""

    def when_failed(self, call: Callable[[], None]) -> None:
        """Have a function called when decoding has ended for good."""

    async def until_ready(self) -> None:
        """Wait until requests are accepted."""

    def begin_drain(self) -> None:
        """Refuse the requests that wait for a model."""

    def give_up(self, error: ApiError) -> None:
        """End all requests with an error."""


class Server(uvicorn.Server):
    """uvicorn's server. The first signal lets running requests end, the second ends it at once."""

    should_exit: bool  # both are made by uvicorn's server, which looks at them in its loop
    force_exit: bool

    def __init__(
        self, config: uvicorn.Config, served: Served, drain: float, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.served = served
        self.drain = drain
        self.on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: Future[None] | None = None
        served.when_failed(self._stop)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the end. `on_ready` is called when requests are accepted."""
        self._loop = asyncio.get_running_loop()
        waiting = self._loop.create_task(self.served.until_ready())
        waiting.add_done_callback(lambda task: None if task.cancelled() else self.on_ready())
        await super().serve(sockets)
        waiting.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal to end."""
        if self.served.draining:
            self.should_exit = True
            self.force_exit = True
            return
        self.served.draining = True
        assert self._loop is not None
        self._draining = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def _drain(self) -> None:
        _LOG.info("shutting down; running requests have %g seconds", self.drain)
        self.served.begin_drain()
        try:
            async with asyncio.timeout(self.drain):
                while self.served.open:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self.served.give_up(shutting_down())
        self._stop()

    def _stop(self) -> None:
        self.should_exit = True


def serve(
    app: FastAPI, served: Served, listening: socket.socket, *, started_at: float, drain: float
) -> None:
    """Serve on a socket until a signal ends it.

    /health is answered before the models are loaded. Raises what ends decoding for good.

    Args:
        app: the app, which starts and stops what it serves.
        served: what it serves.
        listening: the socket, which listens already.
        started_at: when the command started, as a time of `perf_counter`.
        drain: seconds for running requests after the first signal.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    address = listening.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    url = f"http://{host}:{address[1]}"

    def on_ready() -> None:
        _LOG.info("ready in %.1f s: %s", perf_counter() - started_at, url)

    _LOG.info("%s answers 503 until the model is loaded", url)
    Server(config, served, drain, on_ready).run(sockets=[listening])
    if served.failed is not None:
        raise served.failed


def leave() -> None:
    """End the process at once, after what atexit runs.

    A thread may be in a long step, or load or read something. Python would wait for it, or crash.
    """
    atexit._run_exitfuncs()
    os._exit(0)
