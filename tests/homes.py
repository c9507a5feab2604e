"""Homes of forerun that belong to one test."""

from __future__ import annotations

import os
from pathlib import Path


def home_at(path: Path) -> Path:
    """A new home, which has what other tests have compiled and nothing else."""
    path.mkdir(parents=True)
    (path / "native").symlink_to(os.environ["FORERUN_TESTS_NATIVE"])
    return path
