"""Homes of forerun that belong to one test."""

from __future__ import annotations

from pathlib import Path


def home_at(path: Path) -> Path:
    """A new home, with nothing in it. What C was compiled to is found elsewhere (`conftest.py`)."""
    path.mkdir(parents=True)
    return path
