"""The prefix store: keys and values of texts that later prompts may begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forerun.engine.target import Capture
from forerun.model.kv_cache import Stored
from forerun.sampling.threads import one_thread

Tokens = NDArray[np.int64]  # [n]


@dataclass(frozen=True, eq=False)
class Prefix:
    """A text with its keys and values, for prompts with the same cache salt.

    Attributes:
        tokens: the text.
        stored: its keys and values.
        hidden: captured states [n, d] at its last n positions, or None.
        bytes: the size of keys, values and states.
        cache_salt: only prompts with this salt find it.
        capture: what `hidden` are.
    """

    tokens: Tokens
    stored: Stored
    hidden: Tensor | None
    bytes: int
    cache_salt: str
    capture: Capture

    @property
    def state_count(self) -> int:
        """How many of its last positions it has states for."""
        return 0 if self.hidden is None else len(self.hidden)

    def states_before(self, length: int) -> Tensor | None:
        """Return the states [n, d] at the last n of its first `length` positions, if any."""
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
            if entry.cache_salt != cache_salt or not entry.serves(capture, reads):
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

    def put(
        self,
        tokens: Sequence[int],
        stored: Stored,
        hidden: Tensor | None = None,
        cache_salt: str = "",
        capture: Capture = "head",
    ) -> None:
        """Store a text with copies of its keys and values, and of its last hidden states.

        A text is ignored if it alone is larger than the limit, or if the store has it already.

        Args:
            tokens: the text.
            stored: keys and values [G, n, D] by layer.
            hidden: states [m, d] at its last m positions, or None.
            cache_salt: only prompts with this salt find it.
            capture: what `hidden` are.
        """
        if hidden is None:
            capture = ""
        state_count = len(hidden) if hidden is not None else 0
        text = np.asarray(tokens, dtype=np.int64)
        parts = [part for pair in stored if pair is not None for part in pair]
        if hidden is not None:
            parts.append(hidden)
        size = sum(part.numel() * part.element_size() for part in parts)
        if size > self.limit:
            return
        for entry in [entry for entry in self._entries[::-1] if entry.cache_salt == cache_salt]:
            length = common(entry.tokens, text)
            if length == len(text) and capture in ("", entry.capture):
                is_longer = len(entry.tokens) > length
                if is_longer or entry.state_count >= state_count:
                    self._touch(entry)
                    return
            if length == len(entry.tokens) and entry.capture in ("", capture):
                self._remove(entry)
        while self.bytes + size > self.limit:
            self._remove(self._entries[0])
        # One thread copies usual sizes, because torch's other threads would wait actively for the
        # next layer's copy, on cores that the engine's next forward needs.
        with one_thread(max((part.numel() for part in parts), default=0)):
            copies = [
                None if pair is None else (pair[0].clone(), pair[1].clone()) for pair in stored
            ]
            hidden_copy = None if hidden is None else hidden.clone()
        self._entries.append(Prefix(text, copies, hidden_copy, size, cache_salt, capture))
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
