"""Pools that outlive a sequence, in bounded memory: phrases, and outputs of earlier requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from threading import RLock

from forerun.methods.automaton import LINKS, Automaton

KEYS = 16384  # the most tokens with phrases
STATES = 3  # the most states a token, before the automaton is built anew with at most 2
SMALL = 1024  # tokens; a smaller automaton is not built anew


class PhrasePool:
    """Phrases that followed a token before (Ouroboros, arXiv 2402.13720, section 3): the last `most` phrases of `span`
    tokens, for each of the last KEYS tokens.

    A phrase that is added again becomes the newest. Not safe to share between threads.
    """

    def __init__(self, span: int, most: int) -> None:
        assert min(span, most) > 0
        self.span, self.most = span, most
        self._phrases: dict[int, dict[tuple[int, ...], None]] = {}  # both in the order of additions

    def __len__(self) -> int:
        """Return the number of phrases."""
        return sum(map(len, self._phrases.values()))

    def clear(self) -> None:
        self._phrases.clear()

    def add(self, key: int, phrase: Sequence[int]) -> None:
        """Add a phrase of `span` tokens after the token `key`."""
        assert len(phrase) == self.span
        own = self._phrases.pop(key, None)
        if own is None:
            own = {}
            if len(self._phrases) == KEYS:
                del self._phrases[next(iter(self._phrases))]
        self._phrases[key] = own
        kept = tuple(phrase)
        own.pop(kept, None)
        own[kept] = None
        if len(own) > self.most:
            del own[next(iter(own))]

    def drop(self, key: int, phrase: Sequence[int]) -> None:
        """Remove a phrase, if it is there."""
        self._phrases.get(key, {}).pop(tuple(phrase), None)

    def get(self, key: int, count: int | None = None) -> list[tuple[int, ...]]:
        """Return at most `count` phrases after the token `key`, newest first."""
        return list(reversed(self._phrases.get(key, {})))[:count]

    def learn(self, tokens: Sequence[int], start: int = 0) -> int:
        """Add every phrase of a text from `start` on; return the `start` for when the text has grown."""
        end = len(tokens) - self.span
        for at in range(start, end):
            self.add(tokens[at], tokens[at + 1 : at + 1 + self.span])
        return max(start, end)


class SuffixMemory:
    """The most recently used texts, of at most `most` tokens in all, and the automaton of their suffixes.

    A text that is added again is kept once. Readers of the automaton must hold `lock`.
    """

    def __init__(self, most: int) -> None:
        assert most > 0
        self.most, self.lock = most, RLock()
        self.clear()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._size

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Return the texts, least recently used first."""
        return list(self._ends)

    def clear(self) -> None:
        with self.lock:
            self._automaton, self._size = Automaton(None), 0
            self._ends: dict[tuple[int, ...], int] = {}  # {text: its end in the automaton}, in order of use
            self._at: list[tuple[int, tuple[int, ...]]] = []  # (end, text) in order of ends
            self._is_whole = True  # False during a change, which an exception may break off

    @property
    def automaton(self) -> Automaton:
        """Return the automaton of all texts' suffixes."""
        self._mend()
        return self._automaton

    def _mend(self) -> None:
        """Build the automaton anew after a change that was broken off, or if it has too many states: states that a
        removed text has split stay split."""
        if not self._is_whole or self._automaton.size > STATES * max(self._size, SMALL):
            texts = self.texts
            self.clear()
            for text in texts:
                self._put(text)

    def add(self, tokens: Sequence[int]) -> None:
        """Add the last `most` tokens of a text, and remove the least recently used texts beyond `most` tokens.

        A periodic text is cut off, as each token would take longer than the last.
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
        """Mark the text in which a state last occurred as used, if it is still there."""
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


Pool = PhrasePool | SuffixMemory


def new_pool(shape: tuple[int, int]) -> Pool:
    """Return an empty pool of this shape (`Method.phrases`)."""
    return PhrasePool(*shape) if shape[0] else SuffixMemory(shape[1])
