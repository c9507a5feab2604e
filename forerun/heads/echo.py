"""Echoes (ours): whether a drafted token followed the same tokens earlier in the text."""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (6, 4, 3, 2, 1)  # n-grams that are looked up


class Echo:
    """All n-grams of a growing text, each with the token that last followed it."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._known = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Read a text that continues the last one."""
        for at in range(max(self._known, 1), len(tokens)):
            for size in SIZES:
                if at >= size:
                    self._next[tuple(tokens[at - size : at])] = tokens[at]
        self._known = len(tokens)

    def answers(self, context: Sequence[int], drafted: Sequence[int]) -> list[tuple[int, ...]]:
        """Return an entry for each drafted token and each n of SIZES: 1 if that token last followed the same n tokens,
        -1 if another token did, 0 if none did. The last max(SIZES) tokens before the draft suffice as `context`."""
        text, start = [*context, *drafted], len(context)
        found = []
        for at in range(start, len(text)):
            row = []
            for size in SIZES:
                followed = self._next.get(tuple(text[at - size : at])) if at >= size else None
                row.append(0 if followed is None else 1 if followed == text[at] else -1)
            found.append(tuple(row))
        return found
