"""Settings of the whole suite: one thread, the same examples in every run, and nothing from or for the user's home."""

from __future__ import annotations

import os
import tempfile

import torch
from hypothesis import settings

_home = tempfile.TemporaryDirectory(prefix="forerun-tests-")
os.environ["FORERUN_HOME"] = _home.name
torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("suite")
