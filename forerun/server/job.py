"""The run of one body's requests, as the event loop waits for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import perf_counter

from forerun.engine.engine import Step
from forerun.engine.session import Run
from forerun.server.errors import ApiError


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
