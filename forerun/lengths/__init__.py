"""Length policies: when a chain of draft tokens is long enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class LengthPolicy(Protocol):
    """Asked behind every drafted token. It may stop after a token, never discard one that it has looked at:
    that would change the law the token was drawn from."""

    def more(self, tokens: list[int], scores: Tensor) -> bool:
        """Whether to draft on, given the tokens drafted so far and the scores [V] that gave the last one."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """Exactly `gamma` tokens (Leviathan et al., arXiv 2211.17192)."""

    gamma: int

    def more(self, tokens: list[int], scores: Tensor) -> bool:
        return len(tokens) < self.gamma
