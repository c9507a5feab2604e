"""The last prompt, in a cache of one row, and access to earlier texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from forerun.engine.recent_states import RecentStates
from forerun.engine.target import Capture
from forerun.model.kv_cache import KVCache, Stored, are_numbers, parts_of
from forerun.model.prefix_store import Prefix, PrefixStore, Text, common
from forerun.sampling.threads import one_thread

if TYPE_CHECKING:
    from forerun.model.shelf import Shelf

_LOG = logging.getLogger("forerun")
ROW = 0  # the only sequence of a prompt's cache
LONG = 2**24  # bytes of keys and values from which a text is moved where that is possible
# Texts that were moved to a store have a mapping for each layer, of which Linux allows 65,530. If
# as many texts of this size as fill the store had more mappings than this, the text is copied.
MAX_MAPPINGS = 2**14


class PromptCache:
    """Keys, values and hidden states of the last prompt.

    If the next prompt shares a prefix with it, or with a text in the prefix store or on the shelf,
    that prefix is not run again.

    A short prompt is copied to a sequence's row. A long one moves there, because a copy would
    double its memory, and is read from there if the next prompt begins like it.

    Of hidden states only those that a head can need are kept (`RecentStates`): the last ones of a
    prompt, and the last ones of each text in the store and on disk. If a prompt begins like the
    inside of a known text, few or no states are known before the place where the two part. Then the
    head gets those that there are and those of the prompt's new tokens, which may be fewer than it
    reads: the keys and values are used all the same. Fewer states can lower acceptance until enough
    new ones have come; they never change greedy or seeded output. The other choice would be to run
    the last tokens of the common prefix again for their states alone, for which the first new token
    would have to wait.

    A caller that wants all states (`reads` of None) finds only texts that have them all.

    Attributes:
        cache: a cache with the one row `ROW`.
        tokens: the prompt, as far as it was run.
        capture: the hidden states that are kept.
        store: the prefix store, or None.
        shelf: texts on disk, or None.
    """

    def __init__(self, cache: KVCache, prefix_bytes: int) -> None:
        """Take over a cache. `prefix_bytes`: the limit of the prefix store; 0 for no store."""
        self.cache = cache
        self.store = PrefixStore(prefix_bytes) if prefix_bytes else None
        self.shelf: Shelf | None = None
        self.tokens: list[int] = []
        self.capture: Capture = ""
        self._cache_salt = ""
        self._states = RecentStates()
        # The cache and the sequence to which the prompt has moved.
        self._home: tuple[KVCache, int] | None = None
        cache.reset()

    def forget(self) -> None:
        """Empty the cache. Its buffers and the store stay."""
        self.cache.reset()
        self.tokens = []
        self.capture = ""
        self._cache_salt = ""
        self._states = RecentStates()
        self._home = None

    def begin(
        self,
        tokens: list[int],
        cache_salt: str,
        capture: Capture,
        reuse: bool,
        reads: int | None = None,
    ) -> Iterator[None]:
        """Prepare the cache for a prompt. Afterwards `tokens` are those that need not be run.

        Keys and values of the store are copied a layer at a time, with a yield after each if there
        are many, because the caller may have other work that cannot wait for all of them. Those of
        the shelf, and of a sequence to which the last prompt has moved, are copied at once.

        Args:
            tokens: the prompt.
            cache_salt: only texts with this salt are reused.
            capture: the hidden states that are wanted.
            reuse: whether known texts may be reused.
            reads: how many of the last states a head reads; None for all.
        """
        held = self._keep_common(tokens, cache_salt, capture, reuse, reads)
        prefix: Prefix | None = None
        if self.store is not None and reuse:
            match = self.store.find(tokens, held, capture, cache_salt, reads)
            if match is not None:
                prefix, held = match
        states: Tensor | None = None
        if prefix is not None:
            self.tokens = []
            is_long = prefix.bytes * held >= LONG * len(prefix.tokens)
            for _ in self.cache.copy_in_pieces(ROW, prefix.stored, held):
                if is_long:
                    yield
            if capture == prefix.capture:
                states = prefix.states_before(held)
        else:
            self.cache.crop_to([ROW], [held])
            if capture == self.capture:
                self._states.crop(held)
                states = self._states.joined()
        self._states = RecentStates(reads, held, states if capture else None)
        self.tokens = tokens[:held]
        self._cache_salt = cache_salt
        self.capture = capture
        self.cache.reserve(1, len(tokens))
        if self.shelf is not None and reuse:
            # One thread, because others would wait actively between the many small copies.
            with one_thread(0):
                pieces = self.shelf.read(tokens, held, capture, cache_salt, reads)
                for entries, hidden in pieces:
                    self._extend(entries, hidden, tokens)

    def _keep_common(
        self,
        tokens: list[int],
        cache_salt: str,
        capture: Capture,
        reuse: bool,
        reads: int | None,
    ) -> int:
        """Return how many tokens of the last prompt a new one can reuse.

        Their keys and values are in the row `ROW` afterwards.
        """
        is_usable = reuse and cache_salt == self._cache_salt and self._serves(capture, reads)
        held = common(self.tokens, tokens) if is_usable else 0
        if not held:
            self.forget()  # which gives its memory back
        if ROW not in self.cache:
            self.cache.add(ROW, len(tokens))
        if self._home is not None:
            self.cache.copy_in(ROW, self._view(held), held)
            self._home = None
        # A token that gives NaN spoils the tokens before it in its chunk too.
        return held if self.cache.mend(ROW) else 0

    def _serves(self, capture: Capture, reads: int | None) -> bool:
        """Return whether a prompt whose states `capture` are wanted may go on from the last one."""
        if not capture or reads is not None:
            return True
        return self.capture == capture and self._states.start == 0

    def _extend(self, stored: Stored, hidden: Tensor | None, tokens: list[int]) -> None:
        """Append keys and values [G, n, D] and states [n, d] of the next n tokens of a prompt."""
        held = len(self.tokens)
        count = next(pair[0].shape[1] for pair in stored if pair is not None)
        if held:
            rows = self.cache.view(ROW, held + count)
            for into, pair in zip(rows, stored, strict=True):
                if into is not None and pair is not None:
                    into[0][:, held:] = pair[0]
                    into[1][:, held:] = pair[1]
            self.cache.commit([ROW], [range(count)])
        else:
            self.cache.copy_in(ROW, stored, count)  # there may be no buffers yet
        self.tokens = tokens[: held + count]
        self._add_states(count, hidden)

    def _add_states(self, count: int, hidden: Tensor | None) -> None:
        if hidden is None:
            self._states.skip(count)
        else:
            self._states.append(hidden)

    def known(self, tokens: list[int], cache_salt: str) -> int:
        """Return how many tokens of a prompt need not be run."""
        held = common(self.tokens, tokens) if cache_salt == self._cache_salt else 0
        match = self.store.find(tokens, held, "", cache_salt) if self.store is not None else None
        if match is not None:
            held = match[1]
        return held if self.shelf is None else max(held, self.shelf.known(tokens, cache_salt))

    def append(self, tokens: list[int], hidden: Tensor | None) -> None:
        """Commit tokens that were run."""
        self.cache.commit([ROW], [range(len(tokens))])
        self.tokens += tokens
        self._add_states(len(tokens), hidden)

    @property
    def hidden(self) -> Tensor | None:
        """Return the captured hidden states [n, d] at the last n positions, or None before any."""
        return self._states.joined()

    def end(self) -> Iterator[None]:
        """Add the prompt, which was run completely, to the store. Yields as `begin` does."""
        if self.tokens:
            text = Text(list(self.tokens), self.hidden, self._cache_salt, self.capture)
            yield from self._remember(text, self._view(len(self.tokens)), None, has_ended=False)

    def copy_to(self, cache: KVCache, id: int, reserve: int) -> None:
        """Add a row for a sequence, with the prompt, which moves there if it is long."""
        length = len(self.tokens)
        cache.add(id, max(reserve, length))
        if not length:
            return
        is_long = self._home is None and self._bytes >= LONG
        if is_long and self.cache.is_releasable and cache.is_releasable:
            cache.take(id, self.cache, ROW, length)
            self._home = cache, id
        else:
            cache.copy_in(id, self._view(length), length)

    def crop(self, id: int, length: int) -> None:
        """Forget the prompt from a position on, if it has moved to this sequence.

        The sequence is about to forget these positions too.
        """
        if self._home is not None and self._home[1] == id and length < len(self.tokens):
            self._states.crop(length)
            self.tokens = self.tokens[:length]

    def leave(self, cache: KVCache, id: int) -> None:
        """Take the prompt back if it has moved to this sequence, whose row is about to be dropped.

        If the prefix store has the prompt, forget it instead.
        """
        if self._home != (cache, id):
            return
        if self.store is not None and self._bytes <= self.store.limit:
            self.forget()
        else:
            self.cache.take(ROW, cache, id, len(self.tokens))
            self._home = None

    def detach(self, cache: KVCache, id: int, length: int) -> Stored:
        """Return the entries of a sequence that is about to be dropped, for the store.

        If the prompt has moved to this sequence, it is forgotten.
        """
        if self._home == (cache, id):
            self.forget()
        return cache.detach(id, length)

    @property
    def _bytes(self) -> int:
        """Return the bytes of the prompt's keys and values."""
        return len(self.tokens) * (self.cache.position_bytes or 0)

    def _view(self, length: int) -> Stored:
        """Return views of the prompt's first `length` positions, wherever they are."""
        cache, id = self._home or (self.cache, ROW)
        return cache.view(id, length)

    def remember(self, text: Text, stored: Stored, detach: Callable[[], Stored] | None) -> None:
        """Add a text that has ended to the store and the shelf, as far as these exist.

        Args:
            text: the text.
            stored: its keys and values [G, n, D] by layer.
            detach: returns them in memory that nobody else uses; None if they must be copied.
        """
        for _ in self._remember(text, stored, detach, has_ended=True):
            pass

    def _remember(
        self, text: Text, stored: Stored, detach: Callable[[], Stored] | None, has_ended: bool
    ) -> Iterator[None]:
        """Do as `remember`, and yield between the layers of a long text.

        Nothing is added unless all keys, values and states are finite. A lack of memory is logged
        and does not raise, because the request has its answer without it. The shelf copies its
        segments at once.
        """
        if self.store is None and self.shelf is None:
            return
        size = text.bytes_with(stored)
        is_long = size >= LONG
        # All at once, if they are few, because each check waits for a GPU.
        pieces = [[pair] for pair in stored] if is_long else [stored]
        hidden = [] if text.hidden is None else [text.hidden]
        for piece in pieces:
            if not are_numbers([*parts_of(piece), *hidden]):
                return
            hidden = []  # they have been checked
            if is_long:
                yield
        try:
            if self.shelf is not None:
                with one_thread(0):  # as in `begin`
                    self.shelf.put(text, stored, has_ended)
            if self.store is not None and self.store.make_room(text, size):
                kept: Stored = []
                mappings = self.store.limit // max(size, 1) * len(stored)
                if detach is not None and is_long and mappings <= MAX_MAPPINGS:
                    kept = detach()
                else:
                    for piece in pieces:
                        kept += _copies(piece)
                        if is_long:
                            yield
                self.store.put(text.copy(), kept)
        except (MemoryError, RuntimeError) as error:  # including torch.OutOfMemoryError
            _LOG.warning("a text is not kept for later prompts: %r", error)


def _copies(stored: Stored) -> Stored:
    """Return copies of keys and values."""
    # One thread copies usual sizes, because torch's other threads would wait actively for the next
    # layer's copy, on cores that the engine's next forward needs.
    with one_thread(max((part.numel() for part in parts_of(stored)), default=0)):
        return [None if pair is None else (pair[0].clone(), pair[1].clone()) for pair in stored]
