"""What outlives a sequence, in bounded memory and between runs in files: phrases, and outputs of earlier requests."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.methods.automaton import LINKS, Automaton

KEYS = 16384  # tokens that have phrases, at most
_PHRASES = "forerun-phrases-1"
_OUTPUTS = "forerun-suffixes-1"
STATES = 3  # for each token, at most; a new automaton has two at most
SMALL = 1024  # tokens, below which states are not worth counting


class PhrasePool:
    """What came behind a token before (Ouroboros, arXiv 2402.13720, section 3).

    For each of the last KEYS tokens that phrases were put under, its last `most` phrases of `span` tokens.

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
        write_tables(path, "phrases", _PHRASES, {"phrases": table}, about)

    @classmethod
    def load(cls, path: str | Path, vocab_size: int) -> PhrasePool:
        """Reads what `save` wrote. Raises ValueError for a file that is none, is damaged, or belongs to a vocabulary of
        another size."""
        tables, about = read_tables(path, "phrases", _PHRASES, vocab_size)
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
        write_tables(path, "outputs", _OUTPUTS, tables, {"most": self.most, "vocab_size": vocab_size})

    @classmethod
    def load(cls, path: str | Path, vocab_size: int) -> SuffixMemory:
        """Reads what `save` wrote. Raises ValueError for a file that is none, is damaged, or belongs to a vocabulary of
        another size."""
        parts, about = read_tables(path, "outputs", _OUTPUTS, vocab_size)
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


Pool = PhrasePool | SuffixMemory


def new_pool(shape: tuple[int, int]) -> Pool:
    """Return an empty pool of a shape (`Method.phrases`)."""
    return PhrasePool(*shape) if shape[0] else SuffixMemory(shape[1])


def write_tables(path: str | Path, what: str, form: str, tensors: dict[str, Tensor], about: dict[str, int]) -> None:
    """Writes a safetensors file, whole or not at all. `what` names the contents in errors, `form` is their format.

    Raises ValueError where it cannot be written.
    """
    path = Path(path).expanduser()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, {"format": form, "about": json.dumps(about)})
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write the {what} to {path}: {error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_tables(path: str | Path, what: str, form: str, vocab_size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the `about` that `write_tables` wrote.

    Raises ValueError for a file that is none, is damaged, or belongs to a vocabulary of another size.
    """
    path = Path(path).expanduser()
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise ValueError(f"cannot read the {what} in {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is no file of {what}, or a part of one: {error}") from None
    if metadata.get("format") != form:
        raise ValueError(f"{path} is no file of {what}: its format is {metadata.get('format')!r}, not {form!r}")
    try:
        about = json.loads(metadata["about"])
        size = about["vocab_size"]
    except (KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"the {what} in {path} are damaged: their metadata cannot be read") from None
    if size != vocab_size:
        raise ValueError(f"the {what} in {path} are for {size} tokens, not {vocab_size}")
    return tensors, about
