"""The requests of one body, as the event loop waits for their steps."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import perf_counter

from forerun.engine.engine import Step
from forerun.engine.session import Run
from forerun.server.errors import ApiError

TimedStep = tuple[int, Step, float]  # the index of the choice, its step, and when the step came


class Job(Run):
    """A run for the event loop: steps as they come, and perhaps an error after them.

    Attributes:
        started_at: when the body's HTTP request came.
        queued_at: when the requests of the body were queued.
    """

    def __init__(self, started_at: float) -> None:
        super().__init__()
        self.started_at = started_at
        self.queued_at = perf_counter()
        self._steps: list[TimedStep] = []
        self._error: ApiError | None = None
        self._arrival = asyncio.Event()

    def put(self, choice: int, step: Step, at: float) -> None:
        """Add a step of a choice, and wake the waiting caller."""
        self._steps.append((choice, step, at))
        self._arrival.set()

    def fail(self, error: ApiError) -> None:
        """End with an error, unless the job has one already."""
        self.close()
        self.open.clear()
        self._error = self._error or error
        self._arrival.set()

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to take."""
        return not (self.open or self.box or self._steps or self._error)

    async def wait(self, seconds: float) -> list[TimedStep]:
        """Return the steps that have come, or wait for the next ones.

        Returns an empty list if no step comes within `seconds`. Raises the ApiError that ended the
        job once all steps before it have been taken. Only one caller may wait at a time.
        """
        if not self._steps and self._error is None:
            self._arrival.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._arrival.wait()
        steps = self._steps
        self._steps = []
        if not steps and self._error is not None:
            # One error object may end many jobs, so it must not collect their tracebacks.
            raise self._error.with_traceback(None)
        return steps
