"""The hidden states of a text that a head can need: those of its last positions."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# Windows of states begin at multiples of so many positions. It is the length of a segment on disk
# (`forerun.model.segments`), so that a file has the states of all of its tokens or does not exist.
STATE_BLOCK = 256


def first_kept(length: int, reads: int | None) -> int:
    """Return the first position of a text whose state is kept.

    Args:
        length: of the text, in tokens.
        reads: how many of the last states a head reads; None for all.
    """
    if reads is None:
        return 0
    return max(0, length - reads) // STATE_BLOCK * STATE_BLOCK


class RecentStates:
    """Hidden states [n, d] at the last positions of a text that grows.

    A head reads the last `reads` positions of a prompt. So at most `reads + STATE_BLOCK - 1` states
    are kept, because all states of a long prompt would take a large part of the memory that its
    keys and values take: with a hidden size of 1,536 they are 6 KiB per token.

    Attributes:
        reads: how many of the last states a head reads; None keeps all.
        end: number of positions of the text. The last state that is kept is the one before it.
    """

    def __init__(
        self, reads: int | None = None, end: int = 0, states: Tensor | None = None
    ) -> None:
        """Begin with a text of `end` positions, and with the states [n, d] of its last n ones."""
        self.reads = reads
        self.end = end
        self._parts: deque[Tensor] = deque()
        self._count = 0  # of states in all parts
        if states is not None:
            self._parts.append(states)
            self._count = len(states)
            self._trim()

    def __len__(self) -> int:
        return self._count

    @property
    def start(self) -> int:
        """Return the position of the first state that is kept."""
        return self.end - self._count

    def append(self, states: Tensor) -> None:
        """Add the states [n, d] of the next n positions."""
        self._parts.append(states)
        self._count += len(states)
        self.end += len(states)
        self._trim()

    def skip(self, count: int) -> None:
        """Add positions without states. States before a gap are of no use, and are dropped."""
        if count:
            self._parts.clear()
            self._count = 0
        self.end += count

    def crop(self, end: int) -> None:
        """Forget the positions from `end` on."""
        surplus = min(self.end - end, self._count)
        self.end = min(self.end, end)
        self._count -= max(surplus, 0)
        while surplus > 0:
            last = self._parts.pop()
            if len(last) > surplus:
                # A view would keep the whole part in memory.
                self._parts.append(last[: len(last) - surplus].clone())
            surplus -= len(last)

    def joined(self) -> Tensor | None:
        """Return the states [n, d] that are kept, or None if there are none."""
        if len(self._parts) > 1:
            self._parts = deque([torch.cat(list(self._parts))])
        return self._parts[0] if self._parts else None

    def _trim(self) -> None:
        """Drop the states before the window."""
        surplus = first_kept(self.end, self.reads) - self.start
        self._count -= max(surplus, 0)
        while surplus > 0:
            first = self._parts.popleft()
            if len(first) > surplus:
                self._parts.appendleft(first[surplus:].clone())
            surplus -= len(first)
