"""Threads that turn bodies into requests: a long text or a large schema does not hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from forerun.failures import UNATTRIBUTABLE
from forerun.server.errors import ApiError

MOST_CALLS = 256  # calls that run or wait
READERS = 4

_T = TypeVar("_T")


class Readers:
    """A pool of threads with a bounded queue.

    Attributes:
        calls: how many are awaited.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._pool = ThreadPoolExecutor(READERS, "forerun-reader")

    async def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call a function in one of the threads; if the caller is cancelled before that, do not. Raises ApiError if too
        many calls wait."""
        if self.calls >= MOST_CALLS:
            raise ApiError(
                503, "too many requests are being read; try again later", code="queue_full"
            )
        self.calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, _contain, function, *args
            )
        finally:
            self.calls -= 1


def _contain(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function. A panic of a Rust library, which `except Exception` would not catch, becomes a RuntimeError."""
    try:
        return function(*args)
    except (Exception, *UNATTRIBUTABLE):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
