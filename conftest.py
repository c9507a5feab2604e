"""Settings of the whole suite: a thread a process, the same examples in every run, nothing from or for a home."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from hypothesis import settings

from forerun.backends.native import library

_home = tempfile.TemporaryDirectory(prefix="forerun-tests-")
os.environ["FORERUN_HOME"] = _home.name
# C is compiled once for all that run: workers of pytest-xdist find the name that the first process has set.
os.environ.setdefault("FORERUN_NATIVE_FOLDER", f"{_home.name}/native")
# Tests run side by side, and what they start does too.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("suite")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Under `make sanitize` tests that skip for want of C would prove nothing."""
    if os.environ.get("FORERUN_TESTS_NEED_C") and library() is None:
        pytest.exit("C is not in use: there is no compiler, or it cannot build layers.c", returncode=1)
