"""The heap of the C library, from which torch and Python take memory. Needs no torch."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Give freed memory back to the system, where the C library would keep it for later.

    glibc gives back the end of a heap by itself. Keys and values of a known text that are still
    there hold everything before them: after many requests that was a third of all memory. Its
    malloc_trim gives back all free pages, in milliseconds. Other libraries need no such call, or
    have none.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)  # bytes to leave at the end of each heap


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's function, or None with another C library."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_size_t]
    trim: Callable[[int], int] = function
    return trim
