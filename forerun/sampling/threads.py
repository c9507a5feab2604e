"""torch's threads, kept out of the way of ours."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

MOST = 1 << 21  # numbers that one thread takes no longer for than the threads that are waited for


@contextmanager
def one_thread(numbers: int) -> Iterator[None]:
    """Run torch's operations of this block on so many numbers in the calling thread alone, if they are few.

    Its other threads wait actively for a next operation, on cores that the next forward in C needs: a step with sampled
    drafts takes 94 ms instead of 106 (Qwen2.5-Coder 1.5B, two cores of a Zen 4). Only the calling thread is changed,
    through OpenMP; without that nothing is. A user's logits processor runs in the block too.
    """
    openmp, before = _openmp(), torch.get_num_threads()
    if openmp is None or before == 1 or numbers > MOST:
        yield
        return
    try:
        openmp.omp_set_num_threads(1)
        yield
    finally:
        openmp.omp_set_num_threads(before)


@cache
def _openmp() -> Any | None:
    """Return the process's own symbols, among which torch's build has OpenMP's, or None."""
    try:
        found = ctypes.CDLL(None)
        found.omp_set_num_threads.argtypes = [ctypes.c_int]
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows
        return None
    return found
