"""What the app needs of engines, wherever they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from forerun.api.decoder import Decoder
from forerun.engine.engine import Step
from forerun.engine.sequence import Request
from forerun.engine.session import Run
from forerun.server.errors import ApiError


@dataclass(frozen=True)
class Load:
    """Work and memory of engines at one moment.

    Attributes:
        running, waiting: sequences with a row, and in the queue.
        used, allocated: bytes of keys and values, in use and in all.
        hits: prompt tokens that were not computed again.
    """

    running: int = 0
    waiting: int = 0
    used: int = 0
    allocated: int = 0
    hits: int = 0


class Job(Run):
    """A run of one body's requests, for the event loop: its steps as (index of the choice, step, time), and perhaps an
    error after them.

    Attributes:
        begun, queued: when the body's HTTP request came, and when its requests were queued.
    """

    def __init__(self, begun: float) -> None:
        super().__init__()
        self.begun, self.queued = begun, perf_counter()
        self._steps: list[tuple[int, Step, float]] = []
        self._error: ApiError | None = None
        self._came = asyncio.Event()

    def put(self, choice: int, step: Step, at: float) -> None:
        self._steps.append((choice, step, at))
        self._came.set()

    def fail(self, error: ApiError) -> None:
        """End with an error."""
        self.close()
        self.open.clear()
        self._error = self._error or error
        self._came.set()

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to take."""
        return not (self.open or self.box or self._steps or self._error)

    async def wait(self, seconds: float) -> list[tuple[int, Step, float]]:
        """Return the steps that have come, or wait for the next ones; an empty list after `seconds` without any. Raises
        the ApiError that ended it, after the last steps. Only one caller may wait."""
        if not self._steps and self._error is None:
            self._came.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._came.wait()
        found, self._steps = self._steps, []
        if not found and self._error is not None:
            raise self._error.with_traceback(None)  # one error may end many jobs
        return found


class Backend(Protocol):
    """One engine or many. All calls are made in the event loop's thread.

    Attributes:
        decoder: reads bodies; None until the backend is ready.
        ready: set when it can decode.
        failed: what loading raised, or what ended decoding for good.
        on_step: called with every step, and when it came, before its job gets it.
        on_failure: called when `failed` is set.
    """

    decoder: Decoder | None
    ready: asyncio.Event
    failed: BaseException | None
    on_step: Callable[[Step, float], None]
    on_failure: Callable[[], None]

    def start(self) -> None: ...

    async def stop(self) -> None:
        """End all jobs with an error, then decoding."""
        ...

    def submit(self, requests: Sequence[Request], begun: float) -> Job:
        """Queue all requests of a body that came at `begun`, or none. Raises ApiError if the queue is full, or could
        never hold them."""
        ...

    def cancel(self, job: Job) -> None:
        """Abort the requests of a job that have not ended."""
        ...

    def give_up(self, error: ApiError) -> None:
        """End all jobs with an error."""
        ...

    def load(self) -> Load: ...


async def until_ready(backend: Backend) -> None:
    """Wait until a backend can decode. Raises what loading raised."""
    while not backend.ready.is_set():
        if backend.failed is not None:
            raise backend.failed
        await asyncio.sleep(0.05)
