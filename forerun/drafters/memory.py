"""Outputs of earlier requests, to draft from: a bounded number of tokens, kept between runs in a file."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from threading import RLock

import torch

from forerun.drafters.automaton import LINKS, Automaton
from forerun.drafters.tables import read_tables, write_tables

_FORMAT = "forerun-suffixes-1"
STATES = 3  # for each token, at most; a new automaton has two at most
SMALL = 1024  # tokens, below which states are not worth counting


class SuffixMemory:
    """The last texts that were put in or used, of `most` tokens together, and the automaton of their suffixes.

    A text that is put in again is there once. Who reads the automaton holds `lock`.
    """

    def __init__(self, most: int) -> None:
        """Raises ValueError for fewer tokens than 1."""
        if most < 1:
            raise ValueError(f"a memory of outputs needs at least 1 token, not {most}")
        self.most, self.lock = most, RLock()
        self.clear()

    def __len__(self) -> int:
        """The number of tokens."""
        return self._size

    @property
    def shape(self) -> tuple[int, int]:
        """By what `Parts.pools` tells it from others: 0, as its texts have no fixed length, and its most tokens."""
        return 0, self.most

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Least recently used first."""
        return list(self._ends)

    def clear(self) -> None:
        """Forgets everything."""
        with self.lock:
            self._automaton, self._size = Automaton(None), 0
            self._ends: dict[tuple[int, ...], int] = {}  # of each text its last place in the automaton, in order of use
            self._at: list[tuple[int, tuple[int, ...]]] = []  # the same in order of places
            self._is_whole = True  # not while a change is under way, which an exception may end

    @property
    def automaton(self) -> Automaton:
        """That of the suffixes of all texts."""
        self._mend()
        return self._automaton

    def _mend(self) -> None:
        """Makes the automaton anew after a change that was broken off, and where texts that are gone have left too many
        states behind: those that they split stay split."""
        if not self._is_whole or self._automaton.size > STATES * max(self._size, SMALL):
            texts = self.texts
            self.clear()
            for text in texts:
                self._put(text)

    def add(self, tokens: Sequence[int]) -> None:
        """Puts in a text, its last tokens where it is too long; forgets others until there is room.

        Where a text goes round in circles, the rest of it is left out: each token would take longer than the last.
        """
        with self.lock:
            text = tuple(tokens[-self.most :])
            if not text or text in self._ends:
                self._renew(text)
                return
            self._mend()
            self._put(text)
            while self._size > self.most:
                self._forget(next(iter(self._ends)))

    def _put(self, text: tuple[int, ...]) -> None:
        self._is_whole, automaton = False, self._automaton
        last = length = 0
        for token in text:
            last, length = automaton.extend(last, token), length + 1
            if automaton.counted > LINKS:
                break
        text = text[:length]
        if text in self._ends:
            automaton.remove(text)
            self._renew(text)
        else:
            self._ends[text] = automaton.place
            self._at.append((automaton.place, text))
            self._size += length
        self._is_whole = True

    def use(self, state: int) -> None:
        """Renews the text in which a state occurred last, if that is still there."""
        place = self._automaton.newest[state]
        index = bisect_left(self._at, (place,))
        if index < len(self._at):
            end, text = self._at[index]
            if end - len(text) < place:
                self._renew(text)

    def _renew(self, text: tuple[int, ...]) -> None:
        if text in self._ends:
            self._ends[text] = self._ends.pop(text)

    def _forget(self, text: tuple[int, ...]) -> None:
        self._is_whole = False
        end = self._ends.pop(text)
        del self._at[bisect_left(self._at, (end,))]
        self._automaton.remove(text)
        self._size -= len(text)
        self._is_whole = True

    def save(self, path: str | Path, vocab_size: int) -> None:
        """Writes a file for `load`, whole or not at all."""
        with self.lock:
            texts = [text for _, text in self._at]
            rank = {text: at for at, text in enumerate(self._ends)}
        tables = {
            "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
            "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
            "ranks": torch.tensor([rank[text] for text in texts], dtype=torch.int32),
        }
        write_tables(path, "outputs", _FORMAT, tables, {"most": self.most, "vocab_size": vocab_size})

    @classmethod
    def load(cls, path: str | Path, vocab_size: int) -> SuffixMemory:
        """Reads what `save` wrote. Raises ValueError for a file that is none, is damaged, or belongs to a vocabulary of
        another size."""
        parts, about = read_tables(path, "outputs", _FORMAT, vocab_size)
        try:
            memory = cls(about["most"])
            tables = [parts[name] for name in ("tokens", "lengths", "ranks")]
            is_whole = isinstance(memory.most, int)
            is_whole = is_whole and all(table.dtype == torch.int32 and table.ndim == 1 for table in tables)
            tokens, lengths, ranks = (table.flatten().tolist() for table in tables)
            texts, at = [], 0
            for length in lengths:
                texts.append(tuple(tokens[at : at + length]))
                at += length
            is_whole = is_whole and at == len(tokens) <= memory.most and min(lengths, default=1) > 0
            is_whole = is_whole and sorted(ranks) == list(range(len(set(texts)))) == list(range(len(texts)))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"the outputs in {path} are damaged: their tables cannot be read") from None
        if not is_whole or min(tokens, default=0) < 0 or max(tokens, default=0) >= vocab_size:
            raise ValueError(f"the outputs in {path} are damaged: not texts of tokens below {vocab_size}")
        for text in texts:
            memory.add(text)
        for _, text in sorted(zip(ranks, texts, strict=True)):
            memory._renew(text)
        return memory
