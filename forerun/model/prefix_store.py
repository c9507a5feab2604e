"""The prefix store: keys and values of texts that later prompts may begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from forerun.engine.target import Capture
from forerun.model.kv_cache import Stored


@dataclass(frozen=True, eq=False)
class Prefix:
    """A text with its keys and values, for prompts with its salt.

    Attributes:
        hidden: captured states [n, d] at its last n positions, or None.
    """

    tokens: np.ndarray  # [n]
    stored: Stored
    hidden: Tensor | None
    bytes: int
    salt: str
    capture: Capture

    @property
    def state_count(self) -> int:
        """Return for how many of its last positions it has states."""
        return 0 if self.hidden is None else len(self.hidden)

    def states_before(self, length: int) -> Tensor | None:
        """Return the states [n, d] at the last n of its first `length` positions, if there are any."""
        if self.hidden is None:
            return None
        count = len(self.hidden) - (len(self.tokens) - length)
        return self.hidden[:count] if count > 0 else None

    def serves(self, capture: Capture, reads: int | None) -> bool:
        """Return whether it helps a prompt whose states `capture` are wanted: see `PromptCache`."""
        if not capture or reads is not None:
            return True
        return self.capture == capture and self.state_count == len(self.tokens)


class PrefixStore:
    """Texts with their KV, in at most `limit` bytes, without the least recently used ones. A text that continues
    another with its salt replaces it.

    Attributes:
        bytes: present size.
        hits, hit_tokens: number of prompts found in the store, and of their tokens that were not run again.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self.hits = self.hit_tokens = 0
        self._entries: list[Prefix] = []  # the most recently used last

    def __len__(self) -> int:
        return len(self._entries)

    def find(
        self,
        tokens: Sequence[int],
        held: int = 0,
        capture: Capture = "",
        salt: str = "",
        reads: int | None = None,
    ) -> tuple[Prefix, int] | None:
        """Return the text with the longest common prefix with these tokens, and the length of that prefix, or None if
        it is at most `held`.

        With `capture` and without a number of states in `reads`, only texts with all of these hidden
        states count. With a number, the text with the most states before the end of the prefix is
        taken of those that have it."""
        wanted, best, most, most_states = np.asarray(tokens, dtype=np.int64), None, held, 0
        for entry in self._entries:
            if entry.salt != salt or not entry.serves(capture, reads):
                continue
            length = common(entry.tokens, wanted)
            states = entry.states_before(length) if capture == entry.capture else None
            count = len(states) if states is not None else 0
            if length > most or (length == most > held and count > most_states):
                best, most, most_states = entry, length, count
        if best is None:
            return None
        self._touch(best)
        self.hits += 1
        self.hit_tokens += most - held
        return best, most

    def put(
        self,
        tokens: Sequence[int],
        stored: Stored,
        hidden: Tensor | None = None,
        salt: str = "",
        capture: Capture = "head",
    ) -> None:
        """Store a text with copies of its KV [G, n, D] by layer and of the states `hidden` [m, d] at its last m
        positions."""
        capture = capture if hidden is not None else ""
        whole = np.asarray(tokens, dtype=np.int64)
        state_count = len(hidden) if hidden is not None else 0
        parts = [each for pair in stored if pair is not None for each in pair]
        size = sum(
            each.numel() * each.element_size()
            for each in [*parts, *([] if hidden is None else [hidden])]
        )
        if size > self.limit:
            return
        for entry in [each for each in self._entries[::-1] if each.salt == salt]:
            length = common(entry.tokens, whole)
            if length == len(whole) and capture in ("", entry.capture):
                if len(entry.tokens) > length or entry.state_count >= state_count:
                    self._touch(entry)
                    return
            if length == len(entry.tokens) and entry.capture in ("", capture):
                self._remove(entry)
        while self.bytes + size > self.limit:
            self._remove(self._entries[0])
        copies = [None if pair is None else (pair[0].clone(), pair[1].clone()) for pair in stored]
        self._entries.append(
            Prefix(whole, copies, None if hidden is None else hidden.clone(), size, salt, capture)
        )
        self.bytes += size

    def _touch(self, entry: Prefix) -> None:
        self._remove(entry)
        self._entries.append(entry)
        self.bytes += entry.bytes

    def _remove(self, entry: Prefix) -> None:
        self._entries.remove(entry)
        self.bytes -= entry.bytes


def common(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """Return the length of the longest common prefix of two texts."""
    size = min(len(one), len(other))
    if not size or one[0] != other[0]:
        return 0
    different = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(different[0]) if len(different) else size
