"""Forms on a loaded machine, where their threads may wait for a turn."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from forerun.sampling import grammar


def patient() -> AbstractContextManager[object]:
    """Return a context in which a form is waited for, however late its thread gets its turn."""
    return mock.patch.object(grammar, "GRACE_SECONDS", 600.0)
