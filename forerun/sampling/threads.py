"""Keep torch's threads from disturbing ours."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

# For so many numbers one thread takes no longer than several, with the time to wake them.
MAX_NUMBERS_OF_ONE_THREAD = 1 << 21

# Without OpenMP this stays `int`, which does nothing, because no thread of torch waits then.
_set_threads: Any = int
with suppress(AttributeError, OSError, TypeError):  # TypeError: on Windows
    # torch's build brings OpenMP's functions into the process.
    _set_threads = ctypes.CDLL(None).omp_set_num_threads


@contextmanager
def one_thread(numbers: int) -> Iterator[None]:
    """Run torch's operations of a block in the calling thread alone, if their numbers are few.

    Otherwise torch's other threads wait actively for a next operation, on cores that the next
    forward in C needs. A step with sampled drafts takes 94 ms so, and 106 without (Qwen2.5-Coder
    1.5B, two cores of a Zen 4). Only the calling thread is affected.

    Args:
        numbers: how many numbers the operations read.
    """
    before = torch.get_num_threads()
    try:
        _set_threads(1 if numbers <= MAX_NUMBERS_OF_ONE_THREAD else before)
        yield
    finally:
        _set_threads(before)
