"""Keeps torch's threads off the cores that our threads need."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

# Up to this many numbers, one thread takes no longer than several, which must be waited for.
MAX_NUMBERS = 1 << 21
_set_threads: Any = int  # does nothing, because without OpenMP none of torch's threads waits
with suppress(AttributeError, OSError, TypeError):  # TypeError: on Windows
    # torch's build loads OpenMP's functions into the process.
    _set_threads = ctypes.CDLL(None).omp_set_num_threads


@contextmanager
def one_thread(numbers: int) -> Iterator[None]:
    """Run torch's operations in this block in the calling thread alone, if they are small.

    `numbers` is how many numbers they compute on; up to `MAX_NUMBERS` they count as small. Torch's
    other threads would wait actively for a next operation, on cores that the next forward in C
    needs: with one thread a step with sampled drafts takes 94 ms instead of 106 (Qwen2.5-Coder
    1.5B, two cores of a Zen 4). Other threads are not affected.
    """
    before = torch.get_num_threads()
    try:
        _set_threads(1 if numbers <= MAX_NUMBERS else before)
        yield
    finally:
        _set_threads(before)
