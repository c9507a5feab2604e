"""How long a step of the engine waits for what other threads find out."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter
from typing import Any

# Seconds that a step waits for forms, because then its rows can be decoded at once and drafted for.
STEP_SECONDS = 0.02


@dataclass
class _Allowance:
    """Seconds that may still be waited."""

    left: float


# That of the block in which a thread is.
_allowance: ContextVar[_Allowance | None] = ContextVar("_allowance", default=None)


@contextmanager
def short_waits() -> Iterator[None]:
    """Let all waits of this thread in this block take `STEP_SECONDS` together.

    A step has many: for each row, and for each token that is drafted or judged. Other rows of the
    step, which need not wait, bear them all.
    """
    token = _allowance.set(_Allowance(STEP_SECONDS))
    try:
        yield
    finally:
        _allowance.reset(token)


def ends_soon(job: Future[Any]) -> bool:
    """Wait for a job as long as the block allows, and return whether it has ended."""
    allowance = _allowance.get() or _Allowance(STEP_SECONDS)
    started_at = perf_counter()
    wait([job], max(0.0, allowance.left))
    allowance.left -= perf_counter() - started_at
    return job.done()
