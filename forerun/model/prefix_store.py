"""The prefix store: keys and values of texts that later prompts may begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forerun.engine.target import Capture
from forerun.model.kv_cache import Stored, parts_of

Tokens = NDArray[np.int64]  # [n]


@dataclass(frozen=True, eq=False)
class Text:
    """A text whose keys and values are to be kept.

    Attributes:
        tokens: the text.
        hidden: captured states [n, d] at its last n positions, or None.
        cache_salt: only prompts with this salt may find it.
        capture: what `hidden` are.
    """

    tokens: Sequence[int] | Tokens
    hidden: Tensor | None = None
    cache_salt: str = ""
    capture: Capture = "head"

    def copy(self) -> Text:
        """Return the text with states of its own, and tokens that take little memory."""
        hidden = None if self.hidden is None else self.hidden.clone()
        return Text(self.ids, hidden, self.cache_salt, self.capture)

    @cached_property
    def ids(self) -> Tokens:
        """The tokens as an array."""
        return np.asarray(self.tokens, dtype=np.int64)

    @property
    def states(self) -> Capture:
        """Which states it has; "" for none."""
        return "" if self.hidden is None else self.capture

    @property
    def state_count(self) -> int:
        """How many of its last positions it has states for."""
        return 0 if self.hidden is None else len(self.hidden)

    def bytes_with(self, stored: Stored) -> int:
        """Return the bytes of its keys, values and states."""
        parts = parts_of(stored)
        if self.hidden is not None:
            parts.append(self.hidden)
        return sum(part.nbytes for part in parts)


@dataclass(frozen=True, eq=False)
class Prefix:
    """A text with its keys and values, for prompts with the same cache salt.

    Attributes:
        text: the text.
        stored: its keys and values.
        bytes: the size of keys, values and states.
    """

    text: Text
    stored: Stored
    bytes: int

    @property
    def tokens(self) -> Tokens:
        """The text."""
        return self.text.ids

    @property
    def capture(self) -> Capture:
        """Which states it has; "" for none."""
        return self.text.states

    def states_before(self, length: int) -> Tensor | None:
        """Return the states [n, d] at the last n of its first `length` positions, if any."""
        hidden = self.text.hidden
        if hidden is None:
            return None
        count = len(hidden) - (len(self.tokens) - length)
        return hidden[:count] if count > 0 else None

    def serves(self, capture: Capture, reads: int | None) -> bool:
        """Return whether it helps a prompt whose states `capture` are wanted: see `PromptCache`."""
        if not capture or reads is not None:
            return True
        return self.capture == capture and self.text.state_count == len(self.tokens)

    def has(self, text: Text) -> bool:
        """Return whether it is a text, or continues it, with all that is known of that."""
        if self.text.cache_salt != text.cache_salt or text.states not in ("", self.capture):
            return False
        if common(self.tokens, text.ids) < len(text.ids):
            return False
        is_longer = len(self.tokens) > len(text.ids)
        return is_longer or self.text.state_count >= text.state_count

    def is_part_of(self, text: Text) -> bool:
        """Return whether a text is this one, or continues it, with states of the same kind."""
        if self.text.cache_salt != text.cache_salt or self.capture not in ("", text.states):
            return False
        return common(self.tokens, text.ids) == len(self.tokens)


class PrefixStore:
    """The most recently used texts with their keys and values, in at most `limit` bytes.

    A text that continues another one with the same salt replaces it.

    Attributes:
        bytes: present size.
        hits: number of prompts of which a prefix was found in the store.
        hit_tokens: number of their tokens that were not run again.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.hits = 0
        self.hit_tokens = 0
        self._entries: list[Prefix] = []  # the most recently used last

    def __len__(self) -> int:
        return len(self._entries)

    def find(
        self,
        tokens: Sequence[int],
        held: int = 0,
        capture: Capture = "",
        cache_salt: str = "",
        reads: int | None = None,
    ) -> tuple[Prefix, int] | None:
        """Return the text with the longest common prefix with these tokens, and its length.

        Return None if that prefix is no longer than `held`. With `capture` and without a number in
        `reads`, only texts with all of these hidden states count. With a number, of several texts
        with that prefix the one with the most states before its end is taken.
        """
        prompt = np.asarray(tokens, dtype=np.int64)
        best: Prefix | None = None
        best_length = held
        best_states = 0
        for entry in self._entries:
            if entry.text.cache_salt != cache_salt or not entry.serves(capture, reads):
                continue
            length = common(entry.tokens, prompt)
            states = entry.states_before(length) if capture == entry.capture else None
            count = len(states) if states is not None else 0
            has_more = length == best_length > held and count > best_states
            if length > best_length or has_more:
                best = entry
                best_length = length
                best_states = count
        if best is None:
            return None
        self._touch(best)
        self.hits += 1
        self.hit_tokens += best_length - held
        return best, best_length

    def make_room(self, text: Text, size: int) -> bool:
        """Make room for a text of `size` bytes, and return whether the store would keep it.

        Texts that are parts of it go, and then the least recently used ones. A text that alone is
        larger than the limit is not kept. One that the store has already, as it is or continued,
        counts as used now.
        """
        if size > self.limit:
            return False
        holders = [entry for entry in self._entries if entry.has(text)]
        if holders:
            self._touch(holders[-1])
            return False
        for entry in list(self._entries):
            if entry.is_part_of(text):
                self._remove(entry)
        while self.bytes + size > self.limit:
            self._remove(self._entries[0])
        return True

    def put(self, text: Text, stored: Stored) -> None:
        """Keep a text with its keys and values [G, n, D] by layer, if the store wants it.

        These tensors, and the text's states, are the store's own from now on: no copies are made.
        """
        size = text.bytes_with(stored)
        if self.make_room(text, size):
            self._entries.append(Prefix(text, stored, size))
            self.bytes += size

    def _touch(self, entry: Prefix) -> None:
        self._remove(entry)
        self._entries.append(entry)
        self.bytes += entry.bytes

    def _remove(self, entry: Prefix) -> None:
        self._entries.remove(entry)
        self.bytes -= entry.bytes


def common(one: Sequence[int] | Tokens, other: Sequence[int] | Tokens) -> int:
    """Return the length of the longest common prefix of two texts."""
    size = min(len(one), len(other))
    if not size or one[0] != other[0]:
        return 0
    different = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(different[0]) if len(different) else size
