"""Threads that turn bodies into requests, so that a long text does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from forerun.failures import UNATTRIBUTABLE
from forerun.server.errors import ApiError

MAX_CALLS = 256  # calls that run or wait
READERS = 4  # threads

_T = TypeVar("_T")


class Readers:
    """A pool of threads with a bounded queue.

    Attributes:
        calls: how many calls are awaited.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._pool = ThreadPoolExecutor(READERS, "forerun-reader")

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call a function in one of the threads.

        The function is not called if the caller is cancelled before a thread is free. Raises
        ApiError (503) if too many calls wait.
        """
        if self.calls >= MAX_CALLS:
            raise ApiError(
                503, "too many requests are being read; try again later", code="queue_full"
            )
        self.calls += 1
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, _contain, function, *args)
        finally:
            self.calls -= 1


def _contain(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function, and turn a panic of a Rust library into a RuntimeError.

    Such a panic derives from BaseException, so that `except Exception` would not catch it.
    """
    try:
        return function(*args)
    except (Exception, *UNATTRIBUTABLE):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
