"""Echoes (ours): whether a drafted token followed the same tokens earlier in the text."""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (6, 4, 3, 2, 1)  # lengths of the n-grams that are looked up


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
        """Return for each drafted token what is known of it, one number for each n of SIZES.

        The number is 1 if the token last followed the same n tokens, -1 if another token did, and
        0 if the n tokens are new. The last max(SIZES) tokens before the draft suffice as `context`.
        """
        text = [*context, *drafted]
        answers = []
        for at in range(len(context), len(text)):
            row = []
            for size in SIZES:
                followed = self._next.get(tuple(text[at - size : at])) if at >= size else None
                if followed is None:
                    row.append(0)
                else:
                    row.append(1 if followed == text[at] else -1)
            answers.append(tuple(row))
        return answers
