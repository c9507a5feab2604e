"""Settings of plain decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forerun.methods.base import Method


@dataclass(frozen=True)
class AR(Method):
    """Plain autoregressive decoding with the target alone, the baseline."""

    name: ClassVar[str] = "ar"
