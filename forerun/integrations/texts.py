"""Requests of an engine that hands over tokens alone: which of its rows goes on with which text."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from forerun.engine.draft import Draft
from forerun.engine.sequence import Request, Sequence


@dataclass
class Text:
    """What is known of a request: its sequence, and the draft that was proposed last."""

    seq: Sequence
    known: np.ndarray  # [n] its tokens, to be compared with rows
    draft: list[int] = field(default_factory=list)

    def continues(self, tokens: np.ndarray, most: int) -> bool:
        """Whether a row is this text with at most so many tokens more."""
        n = len(self.known)
        if not 0 <= len(tokens) - n <= most or tokens[n - 1] != self.known[-1]:
            return False
        return bool((tokens[:n] == self.known).all())


class Texts:
    """Finds each row's text again. Rows have no names, and an engine moves them about.

    A row goes on with a text that it begins with. Where several requests have the same text, either may be taken for
    the other: whatever is kept of a text follows from its tokens.
    """

    def __init__(self, most: int) -> None:
        """`most`: tokens by which a text grows between two calls, at most."""
        self.most, self.rows = most, dict[int, Text]()
        self._ids = count()

    def follow(self, rows: dict[int, np.ndarray]) -> tuple[dict[int, Text], list[Text]]:
        """The texts of those rows [n] that go on with one, and the texts that no row goes on with, which have ended."""
        found: dict[int, Text] = {}
        left = {text.seq.id: text for text in self.rows.values()}
        for row, tokens in rows.items():  # most stay where they were
            text = self.rows.get(row)
            if text is not None and text.continues(tokens, self.most):
                found[row] = left.pop(text.seq.id)
        for row, tokens in rows.items():
            if row not in found:
                text = next((text for text in left.values() if text.continues(tokens, self.most)), None)
                if text is not None:
                    found[row] = left.pop(text.seq.id)
        self.rows = dict(found)
        return found, list(left.values())

    def begin(self, row: int, tokens: np.ndarray, new: int, limit: int, eos: frozenset[int]) -> Text:
        """The text of a row that was not there before; its last `new` tokens are output."""
        seq = Sequence(Request([int(token) for token in tokens], eos=eos), next(self._ids))
        seq.prompt_length -= new
        seq.limit = limit
        text = self.rows[row] = Text(seq, tokens.copy())
        return text


def agreed(draft: abc.Sequence[int], new: abc.Sequence[int]) -> int:
    """How many tokens of a draft came true."""
    n = 0
    while n < min(len(draft), len(new)) and draft[n] == new[n]:
        n += 1
    return n


def chain_of(draft: Draft) -> list[int]:
    """The drafted tokens of a draft without branches."""
    assert draft.is_chain
    return draft.tokens[1:]
