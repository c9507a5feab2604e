"""The process: the socket, signals, and the end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.server.app import Service, Settings, create_app
from forerun.server.backend import Backend
from forerun.server.errors import shutting_down

_LOG = logging.getLogger("forerun.server")

IDLE = 15  # seconds of a connection without a request
STALLED = 60.0  # seconds that a reader may take nothing while its buffers are full
FLUSH = 5  # seconds for the last bytes at the end
SWITCH = 0.0002  # seconds until the engine's thread and the loop's give way to each other; 0.005 is Python's


class Protocol(H11Protocol):
    """uvicorn's own. It also closes connections without a request, connections whose headers never end, and those of
    readers that have stopped reading."""

    _stalled: asyncio.TimerHandle | None = None
    _heading: asyncio.TimerHandle | None = None  # runs while headers are incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._resumed()
        self._headed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._headed()
        elif self._heading is None:
            self._heading = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def _headed(self) -> None:
        if self._heading is not None:
            self._heading.cancel()
            self._heading = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(STALLED, self.transport.abort)

    def resume_writing(self) -> None:
        self._resumed()
        super().resume_writing()

    def _resumed(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class Server(uvicorn.Server):
    """The first signal begins to drain, the second ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service, drain: float) -> None:
        super().__init__(config)
        self.service, self.drain = service, drain
        self._draining: asyncio.Task[None] | None = None
        service.backend.on_failure = self._stop

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining:
            self.force_exit = self.should_exit = True
        self.service.draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if not self.should_exit and self._draining is None:
            _LOG.info("shutting down; running requests have %g seconds", self.drain)
            self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.drain):
                while self.service.open:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self.service.backend.give_up(shutting_down())
        self._stop()

    def _stop(self) -> None:
        self.should_exit = True


def serve(
    backend: Backend,
    settings: Settings,
    listening: socket.socket,
    *,
    drain: float = 30,
    log_level: str = "info",
    log_json: bool = False,
) -> Service:
    """Serve on a socket until a signal ends it. The backend loads its models after the first answers of /health.

    Raises what the backend fails with.
    """
    set_up_log(log_level, log_json)
    sys.setswitchinterval(SWITCH)
    app = create_app(backend, settings)
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=FLUSH,
    )
    address = listening.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    _LOG.info("http://%s:%d", host, address[1])
    service: Service = app.state.service
    Server(config, service, drain).run(sockets=[listening])
    if backend.failed is not None:
        raise backend.failed
    return service


def leave(service: Service) -> None:
    """End the process if a thread is in a long step, or loads or reads: Python would wait for it, or crash."""
    if service.readers.calls or not service.backend.ended:
        sys.stderr.flush()
        os._exit(0)


def set_up_log(level: str, as_json: bool) -> None:
    """Log our lines and uvicorn's on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("forerun", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger("forerun").level))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname}
        line |= getattr(record, "line", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)
