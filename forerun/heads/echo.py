"""Whether a text repeats itself: the next token of a target that repeats itself is no secret (ours)."""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (6, 4, 3, 2, 1)  # n-grams that are looked up


class Echo:
    """All n-grams of a growing text, each with the token that followed it last."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}
        self._known = 0

    def hear(self, tokens: Sequence[int]) -> None:
        """The text is `tokens` now; the text before is a beginning of it."""
        for at in range(max(self._known, 1), len(tokens)):
            for size in SIZES:
                if at >= size:
                    self._behind[tuple(tokens[at - size : at])] = tokens[at]
        self._known = len(tokens)

    def answers(self, context: Sequence[int], drafted: Sequence[int]) -> list[tuple[int, ...]]:
        """For each of the drafted tokens behind `context` (its last few tokens will do), and for each of SIZES: 1 where
        that token followed the last so many tokens before, -1 where another did, 0 where none did."""
        text, start = [*context, *drafted], len(context)
        found = []
        for at in range(start, len(text)):
            row = []
            for size in SIZES:
                followed = self._behind.get(tuple(text[at - size : at])) if at >= size else None
                row.append(0 if followed is None else 1 if followed == text[at] else -1)
            found.append(tuple(row))
        return found
