"""The process: the socket, signals, and the end."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import sys
from collections.abc import Callable
from time import perf_counter
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.server.app import Service, Settings, create_app
from forerun.server.errors import shutting_down
from forerun.server.worker import Worker

_LOG = logging.getLogger("forerun.server")

IDLE = 15  # seconds of a connection without a request
STALLED = 60.0  # seconds that a reader may take nothing while its buffers are full
FLUSH = 5  # seconds for the last bytes at the end
SWITCH = 0.0002  # seconds until the engine's thread and the loop's give way to each other; 0.005 is Python's


class Protocol(H11Protocol):
    """uvicorn's own. It also closes connections without a request, connections whose headers never end, and those of
    readers that have stopped reading."""

    _timer: asyncio.TimerHandle | None = None

    def _abort_after(self, seconds: float | None) -> None:
        """Close the connection after some time, unless this is called again before; None is never."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = (
            None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._abort_after(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._abort_after(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if (
            self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        ):  # headers are incomplete
            if self._timer is None:
                self._abort_after(self.timeout_keep_alive)
        elif not self.flow.write_paused:
            self._abort_after(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_after(STALLED)

    def resume_writing(self) -> None:
        self._abort_after(None)
        super().resume_writing()


class Server(uvicorn.Server):
    """The first signal begins to drain, the second ends at once."""

    def __init__(
        self, config: uvicorn.Config, service: Service, drain: float, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.service, self.drain, self.on_ready = service, drain, on_ready
        service.worker.on_failure = self._stop

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        waiting = self._loop.create_task(self.service.worker.ready.wait())
        waiting.add_done_callback(lambda task: None if task.cancelled() else self.on_ready())
        await super().serve(sockets)
        waiting.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining:
            self.force_exit = self.should_exit = True
            return
        self.service.draining = True
        self._draining = asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def _drain(self) -> None:
        _LOG.info("shutting down; running requests have %g seconds", self.drain)
        try:
            async with asyncio.timeout(self.drain):
                while self.service.open:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self.service.worker.give_up(shutting_down())
        self._stop()

    def _stop(self) -> None:
        self.should_exit = True


def serve(
    worker: Worker, settings: Settings, listening: socket.socket, *, begun: float, drain: float
) -> None:
    """Serve on a socket until a signal ends it. The worker loads its models after the first answers of /health.

    `begun`: when the command did, by `perf_counter`. Raises what the worker fails with.
    """
    sys.setswitchinterval(SWITCH)
    app = create_app(worker, settings)
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
    url = f"http://{host}:{address[1]}"
    _LOG.info("%s answers 503 until the model is loaded", url)
    Server(
        config,
        app.state.service,
        drain,
        lambda: _LOG.info("ready in %.1f s: %s", perf_counter() - begun, url),
    ).run(sockets=[listening])
    if worker.failed is not None:
        raise worker.failed


def leave() -> None:
    """End the process at once: for a thread in a long step, or one that loads or reads, Python would wait, or crash."""
    atexit._run_exitfuncs()
    os._exit(0)
