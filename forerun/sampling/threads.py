"""Keeps torch's threads off the cores that our threads need."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

# Up to this many numbers, one thread takes no longer than several, which must be waited for.
MAX_NUMBERS_OF_ONE_THREAD = 1 << 21

# Without OpenMP this stays `int`, which does nothing, because torch then has no waiting threads.
_set_threads: Any = int
with suppress(AttributeError, OSError, TypeError):  # TypeError: on Windows
    # torch's build brings OpenMP's functions into the process.
    _set_threads = ctypes.CDLL(None).omp_set_num_threads


@contextmanager
def one_thread(numbers: int) -> Iterator[None]:
    """Run torch's operations in this block in the calling thread alone, if they are small.

    After an operation torch's other threads wait actively for the next one, on cores that the next
    forward in C needs. A step with sampled drafts takes 94 ms with one thread, and 106 ms without
    this (Qwen2.5-Coder 1.5B, two cores of a Zen 4). Only the calling thread is affected.

    Args:
        numbers: how many numbers the operations read.
    """
    before = torch.get_num_threads()
    try:
        _set_threads(1 if numbers <= MAX_NUMBERS_OF_ONE_THREAD else before)
        yield
    finally:
        _set_threads(before)
