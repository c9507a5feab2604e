"""Settings of the whole suite: a thread a process, the same examples in every run, nothing from or for a home."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from hypothesis import settings

_home = tempfile.TemporaryDirectory(prefix="forerun-tests-")
os.environ["FORERUN_HOME"] = _home.name
# C is compiled once for all that run: workers of pytest-xdist find the name that the first process has set.
_native = Path(os.environ.setdefault("FORERUN_TESTS_NATIVE", f"{_home.name}/native"))
_native.mkdir(exist_ok=True)
if not (Path(_home.name) / "native").exists():
    (Path(_home.name) / "native").symlink_to(_native)
# Tests run side by side, and what they start does too.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("suite")
