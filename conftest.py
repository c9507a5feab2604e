"""Settings of the whole suite.

Each process computes in one thread, Hypothesis draws the same examples in every run, and nothing is
read from or written to the user's home folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from forerun.csrc.library import library, missing

_home = tempfile.TemporaryDirectory(prefix="forerun-tests-")
os.environ["FORERUN_HOME"] = _home.name
# Tests run side by side, and what they start does too.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("suite")


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A server with a tiny model, for the tests of a module."""
    from tests.support.serving import live

    with live(max_body=2**21) as found:
        yield found


def pytest_sessionstart(session: pytest.Session) -> None:
    """Without the C library most tests of few-bit weights would prove nothing."""
    if library() is None:
        pytest.exit(f"the C library is not in use: {missing()}", returncode=1)
