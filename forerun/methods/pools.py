"""What outlives a sequence, in bounded memory: phrases, and outputs of earlier requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from threading import RLock

from forerun.methods.automaton import LINKS, Automaton

KEYS = 16384  # tokens that have phrases, at most
STATES = 3  # for each token, at most; a new automaton has two at most
SMALL = 1024  # tokens, below which states are not worth counting


class PhrasePool:
    """What came after a token before (Ouroboros, arXiv 2402.13720, section 3).

    For each of the last KEYS tokens that phrases were put under, its last `most` phrases of `span` tokens.

    A phrase that is put in again becomes the newest. Not safe to share between threads.
    """

    def __init__(self, span: int, most: int) -> None:
        assert min(span, most) > 0
        self.span, self.most = span, most
        self._phrases: dict[int, dict[tuple[int, ...], None]] = {}  # both in the order in which things were put in

    def __len__(self) -> int:
        """The number of phrases."""
        return sum(map(len, self._phrases.values()))

    def clear(self) -> None:
        self._phrases.clear()

    def add(self, key: int, phrase: Sequence[int]) -> None:
        """Put a phrase of `span` tokens under the token that comes before it."""
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
        """Take a phrase out, if it is there."""
        self._phrases.get(key, {}).pop(tuple(phrase), None)

    def get(self, key: int, count: int | None = None) -> list[tuple[int, ...]]:
        """Return the phrases under a token, newest first, at most `count`."""
        return list(reversed(self._phrases.get(key, {})))[:count]

    def learn(self, tokens: Sequence[int], start: int = 0) -> int:
        """Put in every stretch of a text from `start` on; return where to go on when the text has grown."""
        end = len(tokens) - self.span
        for at in range(start, end):
            self.add(tokens[at], tokens[at + 1 : at + 1 + self.span])
        return max(start, end)


class SuffixMemory:
    """The last texts that were put in or used, of `most` tokens together, and the automaton of their suffixes.

    A text that is put in again is there once. Readers of the automaton hold `lock`.
    """

    def __init__(self, most: int) -> None:
        assert most > 0
        self.most, self.lock = most, RLock()
        self.clear()

    def __len__(self) -> int:
        """The number of tokens."""
        return self._size

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Least recently used first."""
        return list(self._ends)

    def clear(self) -> None:
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
        """Make the automaton anew after a change that was broken off, or if removed texts have left too many states:
        those that they split stay split."""
        if not self._is_whole or self._automaton.size > STATES * max(self._size, SMALL):
            texts = self.texts
            self.clear()
            for text in texts:
                self._put(text)

    def add(self, tokens: Sequence[int]) -> None:
        """Put in a text, its last tokens if it is too long; forget others until there is room.

        Of a text that goes round in circles the rest is left out: each token would take longer than the last.
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
        """Renew the text in which a state occurred last, if that is still there."""
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
    """Return an empty pool of a shape (`Method.phrases`)."""
    return PhrasePool(*shape) if shape[0] else SuffixMemory(shape[1])
