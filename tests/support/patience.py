"""Forms on a loaded machine, where their threads may wait for a turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from forerun.sampling import waits


@contextmanager
def patient() -> Iterator[None]:
    """In this block a form is waited for, however late its thread gets its turn."""
    with mock.patch.object(waits, "STEP_SECONDS", 600.0), waits.short_waits():
        yield
