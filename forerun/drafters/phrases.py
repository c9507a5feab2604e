"""A pool of phrases: what came behind a token before (Ouroboros, arXiv 2402.13720, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from forerun.drafters.tables import read_tables, write_tables

KEYS = 16384  # tokens that have phrases, at most
_FORMAT = "forerun-phrases-1"


class PhrasePool:
    """For each of the last KEYS tokens that phrases were put under, its last `most` phrases of `span` tokens.

    A phrase that is put in again becomes the newest. Not safe to share between threads.
    """

    def __init__(self, span: int, most: int) -> None:
        """Raises ValueError for a `span` or a `most` below 1."""
        if min(span, most) < 1:
            raise ValueError(f"phrases need at least 1 token, and 1 of them a key, not {span} and {most}")
        self.span, self.most = span, most
        self._phrases: dict[int, dict[tuple[int, ...], None]] = {}  # both in the order in which things were put in

    def __len__(self) -> int:
        """The number of phrases."""
        return sum(map(len, self._phrases.values()))

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens of a phrase, and how many phrases a token has at most."""
        return self.span, self.most

    def clear(self) -> None:
        """Forgets all phrases."""
        self._phrases.clear()

    def add(self, key: int, phrase: Sequence[int]) -> None:
        """Puts a phrase of `span` tokens under the token that comes before it."""
        assert len(phrase) == self.span
        mine = self._phrases.pop(key, None)
        if mine is None:
            mine = {}
            if len(self._phrases) == KEYS:
                del self._phrases[next(iter(self._phrases))]
        self._phrases[key] = mine
        kept = tuple(phrase)
        mine.pop(kept, None)
        mine[kept] = None
        if len(mine) > self.most:
            del mine[next(iter(mine))]

    def drop(self, key: int, phrase: Sequence[int]) -> None:
        """Takes a phrase out, if it is there."""
        mine = self._phrases.get(key, {})
        mine.pop(tuple(phrase), None)

    def get(self, key: int, count: int | None = None) -> list[tuple[int, ...]]:
        """The phrases under a token, newest first, at most `count`."""
        return list(reversed(self._phrases.get(key, {})))[:count]

    def learn(self, tokens: Sequence[int], start: int = 0) -> int:
        """Puts in every stretch of a text from position `start` on; returns where to go on when the text has grown."""
        end = len(tokens) - self.span
        for at in range(start, end):
            self.add(tokens[at], tokens[at + 1 : at + 1 + self.span])
        return max(start, end)

    def save(self, path: str | Path, vocab_size: int) -> None:
        """Writes a file for `load`, whole or not at all."""
        rows = [[key, *phrase] for key, mine in self._phrases.items() for phrase in mine]
        table = torch.tensor(rows, dtype=torch.int32).view(-1, self.span + 1)
        about = {"most": self.most, "vocab_size": vocab_size, "span": self.span}
        write_tables(path, "phrases", _FORMAT, {"phrases": table}, about)

    @classmethod
    def load(cls, path: str | Path, vocab_size: int) -> PhrasePool:
        """Reads what `save` wrote. Raises ValueError for a file that is none, is damaged, or belongs to a vocabulary of
        another size."""
        tables, about = read_tables(path, "phrases", _FORMAT, vocab_size)
        try:
            table, pool = tables["phrases"], cls(about["span"], about["most"])
        except (KeyError, TypeError):
            raise ValueError(f"the phrases in {path} are damaged: their metadata cannot be read") from None
        if table.ndim != 2 or table.shape[1] != pool.span + 1 or bool(((table < 0) | (table >= vocab_size)).any()):
            raise ValueError(
                f"the phrases in {path} are damaged: not rows of {pool.span + 1} tokens below {vocab_size}"
            )
        for key, *phrase in table.tolist():
            pool.add(key, phrase)
        return pool
