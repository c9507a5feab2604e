"""Echoes: whether a drafted token is the one that followed the same tokens before in the text (ours)."""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (6, 4, 3, 2, 1)  # n-grams that are looked up


class Echo:
    """All n-grams of a growing text, each with the token that last followed it."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._known = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Take `tokens` as the text, which continues the last one."""
        for at in range(max(self._known, 1), len(tokens)):
            for size in SIZES:
                if at >= size:
                    self._next[tuple(tokens[at - size : at])] = tokens[at]
        self._known = len(tokens)

    def answers(self, context: Sequence[int], drafted: Sequence[int]) -> list[tuple[int, ...]]:
        """Return for each drafted token after `context` (its last few tokens suffice) and each n of SIZES: 1 if that
        token followed the same n tokens before, -1 if another one did, 0 if none did."""
        text, start = [*context, *drafted], len(context)
        found = []
        for at in range(start, len(text)):
            row = []
            for size in SIZES:
                followed = self._next.get(tuple(text[at - size : at])) if at >= size else None
                row.append(0 if followed is None else 1 if followed == text[at] else -1)
            found.append(tuple(row))
        return found
