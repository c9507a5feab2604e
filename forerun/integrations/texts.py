"""Requests of an engine that hands over rows of tokens without names: which row continues which text."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from forerun.engine.sequence import Request, Sequence


@dataclass
class Text:
    """A request: its sequence, and the draft that was proposed last."""

    seq: Sequence
    known: np.ndarray  # [n] its tokens, to be compared with rows
    draft: list[int] = field(default_factory=list)

    def continues(self, tokens: np.ndarray, most: int) -> bool:
        """Return whether a row is this text with at most `most` tokens more."""
        n = len(self.known)
        if not 0 <= len(tokens) - n <= most or tokens[n - 1] != self.known[-1]:
            return False
        return bool((tokens[:n] == self.known).all())


class Texts:
    """Finds each row's text again. Rows have no names, and an engine moves them about.

    A row continues a text that it begins with. If several requests have the same text, either may be taken for the
    other: whatever is kept of a text follows from its tokens.
    """

    def __init__(self, most: int) -> None:
        """`most`: tokens by which a text grows between two calls, at most."""
        self.most, self.rows = most, dict[int, Text]()
        self._ids = count()

    def follow(self, rows: dict[int, np.ndarray]) -> tuple[dict[int, Text], list[Text]]:
        """Return the texts that rows [n] continue, by row, and the texts that no row continues, which have ended."""
        found, left = dict[int, Text](), dict(self.rows)
        for row, tokens in rows.items():  # most stay where they were
            if row in left and left[row].continues(tokens, self.most):
                found[row] = left.pop(row)
        for row in [row for row in rows if row not in found]:
            old = next((old for old, text in left.items() if text.continues(rows[row], self.most)), None)
            if old is not None:
                found[row] = left.pop(old)
        self.rows = dict(found)
        return found, list(left.values())

    def begin(self, row: int, tokens: np.ndarray, new: int, limit: int, eos: frozenset[int]) -> Text:
        """Return the text of a row that is new; its last `new` tokens are output."""
        seq = Sequence(Request([int(token) for token in tokens], eos=eos), next(self._ids))
        seq.prompt_length -= new
        seq.limit = limit
        text = self.rows[row] = Text(seq, tokens.copy())
        return text
