"""A pool of phrases: what came behind a token before (Ouroboros, arXiv 2402.13720, section 3)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

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
        """Writes a safetensors file, whole or not at all."""
        path = Path(path).expanduser()
        rows = [[key, *phrase] for key, mine in self._phrases.items() for phrase in mine]
        table = torch.tensor(rows, dtype=torch.int32).view(-1, self.span + 1)
        about = {"most": self.most, "vocab_size": vocab_size, "span": self.span}
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"phrases": table}, temporary, {"format": _FORMAT, "about": json.dumps(about)})
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot write the phrases to {path}: {error}") from None
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path, vocab_size: int) -> PhrasePool:
        """Reads what `save` wrote. Raises ValueError for a file that is none, is damaged, or belongs to a vocabulary of
        another size."""
        path = Path(path).expanduser()
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                table = file.get_tensor("phrases") if "phrases" in file.keys() else None  # noqa: SIM118
        except OSError as error:
            raise ValueError(f"cannot read the phrases in {path}: {error.strerror or error}") from None
        except SafetensorError as error:
            raise ValueError(f"{path} is no file of phrases, or a part of one: {error}") from None
        if about.get("format") != _FORMAT or table is None:
            raise ValueError(f"{path} is no file of phrases: its format is {about.get('format')!r}, not {_FORMAT!r}")
        try:
            settings = json.loads(about["about"])
            size, pool = settings["vocab_size"], cls(settings["span"], settings["most"])
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ValueError(f"the phrases in {path} are damaged: their metadata cannot be read") from None
        if size != vocab_size:
            raise ValueError(f"the phrases in {path} are for {size} tokens, not {vocab_size}")
        if table.ndim != 2 or table.shape[1] != pool.span + 1 or bool(((table < 0) | (table >= vocab_size)).any()):
            raise ValueError(
                f"the phrases in {path} are damaged: not rows of {pool.span + 1} tokens below {vocab_size}"
            )
        for key, *phrase in table.tolist():
            pool.add(key, phrase)
        return pool
