"""Failures that tests cause: a panic, and an interrupt inside a call."""

from __future__ import annotations

from itertools import count
from typing import Any


class Panic(BaseException):
    """Like the PanicException of a Rust library (pyo3): `except Exception` does not catch it."""


def interrupt_once(owner: Any, name: str, after: int) -> None:
    """Have a method raise KeyboardInterrupt at the end of a call, after that number of calls."""
    real = getattr(owner, name)
    calls = count()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        value = real(*args, **kwargs)
        if next(calls) == after:
            raise KeyboardInterrupt
        return value

    setattr(owner, name, interrupted)
