"""The last prompt, in a cache of one row, and the prefix store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from forerun.engine.recent_states import RecentStates
from forerun.engine.target import Capture
from forerun.model.kv_cache import KVCache, Stored, are_numbers
from forerun.model.prefix_store import PrefixStore, common
from forerun.sampling.threads import one_thread

if TYPE_CHECKING:
    from forerun.model.prompt_folder import Shelf

_LOG = logging.getLogger("forerun")
ROW = 0  # the only sequence of a prompt's cache
MOVED = 2**24  # bytes of keys and values from which a prompt moves to its row


class PromptCache:
    """Keys, values and hidden states of the last prompt. A prefix of the next one in it or in the store is not run
    again.

    A short prompt is copied to a sequence's row. A long one moves there, as copies would double what it takes, and is
    read from there if the next prompt begins like it.

    Of hidden states only those that a head can need are kept (`RecentStates`): the last ones of a
    prompt, and the last ones of each text in the store and on disk. If a prompt begins like the
    inside of a known text, few or no states are known before the place where the two part. Then the
    head gets those that there are and those of the prompt's new tokens, which may be fewer than it
    reads: the keys and values are used all the same. Fewer states can cost acceptance for some
    tokens, until enough new ones have come; they never change greedy or seeded output. The other choice would be
    to run the last tokens of the common beginning again for their states alone, which the first
    new token would have to wait for.

    A caller that wants all states (`reads` of None) finds only texts that have them all.

    Attributes:
        tokens: the prompt, as far as it was run.
        capture: the hidden states that are kept.
        store: the prefix store, or None.
        shelf: texts on disk, or None.
    """

    tokens: list[int]
    capture: Capture
    _salt: str
    _states: RecentStates
    _home: tuple[KVCache, int] | None  # the cache and the sequence to which the prompt has moved

    def __init__(self, cache: KVCache, prefix_bytes: int) -> None:
        """Take over a cache."""
        self.cache, self.store = cache, PrefixStore(prefix_bytes) if prefix_bytes else None
        self.shelf: Shelf | None = None
        self.forget()

    def forget(self) -> None:
        """Empty the cache. Its buffers and the store stay."""
        self.cache.reset()
        self.tokens, self.capture, self._salt, self._home = [], "", "", None
        self._states = RecentStates()

    def begin(
        self, tokens: list[int], salt: str, capture: Capture, reuse: bool, reads: int | None = None
    ) -> int:
        """Prepare the cache for a prompt; return the number of tokens that need not be run, 0 without `reuse`."""
        cache = self.cache
        known = reuse and salt == self._salt and self._serves(capture, reads)
        held = common(self.tokens, tokens) if known else 0
        if not held:
            self.forget()  # its memory goes back
        if ROW not in cache:
            cache.add(ROW, len(tokens))
        if self._home is not None:
            cache.copy_in(ROW, self._view(held), held)
            self._home = None
        # A token that gives NaN spoils those before it in its chunk too.
        held = held if cache.mend(ROW) else 0
        stored = (
            self.store.find(tokens, held, capture, salt, reads)
            if self.store is not None and reuse
            else None
        )
        states = None
        if stored is not None:
            entry, held = stored
            cache.copy_in(ROW, entry.stored, held)
            if capture == entry.capture:
                states = entry.states_before(held)
        else:
            cache.crop_to([ROW], [held])
            if capture == self.capture:
                self._states.crop(held)
                states = self._states.joined()
        self._states = RecentStates(reads, held, states if capture else None)
        self.tokens, self._salt, self.capture = tokens[:held], salt, capture
        cache.reserve(1, len(tokens))
        if self.shelf is not None and reuse:
            with one_thread(
                0
            ):  # because other threads would wait actively between many small copies
                for entries, hidden in self.shelf.read(tokens, held, capture, salt, reads):
                    self._extend(entries, hidden, tokens)
        return len(self.tokens)

    def _serves(self, capture: Capture, reads: int | None) -> bool:
        """Return whether a prompt whose states `capture` are wanted may go on from the last one."""
        if not capture or reads is not None:
            return True
        return self.capture == capture and self._states.start == 0

    def _extend(self, stored: Stored, hidden: Tensor | None, tokens: list[int]) -> None:
        """Append keys and values [G, n, D] and states [n, d] of the next n tokens of a prompt."""
        cache, held = self.cache, len(self.tokens)
        count = next(pair[0].shape[1] for pair in stored if pair is not None)
        if held:
            rows = cache.view(ROW, held + count)
            for into, pair in zip(rows, stored, strict=True):
                if into is not None and pair is not None:
                    into[0][:, held:] = pair[0]
                    into[1][:, held:] = pair[1]
            cache.commit([ROW], [range(count)])
        else:
            cache.copy_in(ROW, stored, count)  # there may be no buffers yet
        self.tokens = tokens[: held + count]
        self._add_states(count, hidden)

    def _add_states(self, count: int, hidden: Tensor | None) -> None:
        if hidden is None:
            self._states.skip(count)
        else:
            self._states.append(hidden)

    def known(self, tokens: list[int], salt: str) -> int:
        """Return how many tokens of a prompt need not be run."""
        held = common(self.tokens, tokens) if salt == self._salt else 0
        stored = self.store.find(tokens, held, "", salt) if self.store is not None else None
        held = held if stored is None else stored[1]
        return held if self.shelf is None else max(held, self.shelf.known(tokens, salt))

    def append(self, tokens: list[int], hidden: Tensor | None) -> None:
        """Commit tokens that were run."""
        self.cache.commit([ROW], [range(len(tokens))])
        self.tokens += tokens
        self._add_states(len(tokens), hidden)

    @property
    def hidden(self) -> Tensor | None:
        """Return the captured hidden states [n, d] at the last n positions, or None before any."""
        return self._states.joined()

    def end(self) -> None:
        """Add the prompt, which was run completely, to the store."""
        if self.tokens:
            stored = self._view(len(self.tokens))
            self.remember(
                self.tokens, stored, self.hidden, self._salt, self.capture, has_ended=False
            )

    def copy_to(self, cache: KVCache, id: int, reserve: int) -> None:
        """Add a row for a sequence, with a copy of the prompt, or with the prompt itself if it is long."""
        length = len(self.tokens)
        cache.add(id, max(reserve, length))
        if not length:
            return
        if (
            self._home is None
            and self._bytes >= MOVED
            and self.cache.is_releasable
            and cache.is_releasable
        ):
            cache.take(id, self.cache, ROW, length)
            self._home = cache, id
        else:
            cache.copy_in(id, self._view(length), length)

    def crop(self, id: int, length: int) -> None:
        """Forget the prompt from a position on if it has moved to this sequence, which forgets it too."""
        if self._home is not None and self._home[1] == id and length < len(self.tokens):
            self._states.crop(length)
            self.tokens = self.tokens[:length]

    def leave(self, cache: KVCache, id: int) -> None:
        """Take a prompt back that has moved to this sequence, whose row is to be dropped. Forget it if the prefix store
        has it."""
        if self._home != (cache, id):
            return
        if self.store is not None and self._bytes <= self.store.limit:
            self.forget()
        else:
            self.cache.take(ROW, cache, id, len(self.tokens))
            self._home = None

    @property
    def _bytes(self) -> int:
        """Return the bytes of the prompt's keys and values."""
        return len(self.tokens) * (self.cache.position_bytes or 0)

    def _view(self, length: int) -> Stored:
        """Return views of the prompt's first `length` positions, wherever they are."""
        cache, id = self._home or (self.cache, ROW)
        return cache.view(id, length)

    def remember(
        self,
        tokens: Sequence[int],
        stored: Stored,
        hidden: Tensor | None,
        salt: str,
        capture: Capture,
        has_ended: bool = True,
    ) -> None:
        """Add a text to the store and the shelf, if there are any and all keys, values and states are finite.

        `hidden` [n, d] are the states at its last n positions.
        """
        if self.store is None and self.shelf is None:
            return
        parts = [part for pair in stored if pair is not None for part in pair]
        if are_numbers(parts if hidden is None else [*parts, hidden]):
            try:
                if self.shelf is not None:
                    with one_thread(0):  # likewise
                        self.shelf.put(tokens, stored, hidden, salt, capture, has_ended)
                if self.store is not None:
                    self.store.put(tokens, stored, hidden, salt, capture)
            except (MemoryError, RuntimeError) as error:  # including torch.OutOfMemoryError
                _LOG.warning(
                    "a text is not kept for later prompts: %r", error
                )  # not the request's fault
