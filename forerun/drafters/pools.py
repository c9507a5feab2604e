"""Pools that outlive a sequence, in bounded memory: phrases, and outputs of earlier requests."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

from forerun.drafters.automaton import Automaton

KEYS = 16384  # the most tokens with phrases


class PhrasePool:
    """Phrases that followed a token before (Ouroboros, arXiv 2402.13720, section 3).

    Of each of the last KEYS tokens it has the last `most` phrases of `span` tokens. A phrase that
    is added again becomes the newest. A pool is not safe to share between threads.
    """

    def __init__(self, span: int, most: int) -> None:
        assert min(span, most) > 0
        self.span = span
        self.most = most
        # {token: phrases}, both in the order of additions
        self._phrases: dict[int, dict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        """Return the number of phrases."""
        return sum(map(len, self._phrases.values()))

    def clear(self) -> None:
        """Forget all phrases."""
        self._phrases.clear()

    def add(self, key: int, phrase: Sequence[int]) -> None:
        """Add a phrase of `span` tokens after the token `key`."""
        assert len(phrase) == self.span
        phrases = self._phrases.pop(key, None)
        if phrases is None:
            phrases = {}
            if len(self._phrases) == KEYS:
                del self._phrases[next(iter(self._phrases))]
        self._phrases[key] = phrases
        kept = tuple(phrase)
        phrases.pop(kept, None)
        phrases[kept] = None
        if len(phrases) > self.most:
            del phrases[next(iter(phrases))]

    def drop(self, key: int, phrase: Sequence[int]) -> None:
        """Remove a phrase, if it is there."""
        self._phrases.get(key, {}).pop(tuple(phrase), None)

    def get(self, key: int, count: int | None = None) -> list[tuple[int, ...]]:
        """Return at most `count` phrases after the token `key`, newest first."""
        return list(reversed(self._phrases.get(key, {})))[:count]

    def learn(self, tokens: Sequence[int], start: int = 0) -> int:
        """Add every phrase of a text from `start` on.

        Return the `start` for the next call, when the text has grown.
        """
        end = len(tokens) - self.span
        for at in range(start, end):
            self.add(tokens[at], tokens[at + 1 : at + 1 + self.span])
        return max(start, end)


class SuffixMemory:
    """The newest texts, of at most `most` tokens in all, and the automaton of their suffixes.

    A text that is added again is kept once, as the newest. The automaton reads texts when it is
    next asked for, because nobody may draft for a long time. Its readers must hold `lock`.

    An automaton cannot forget, and to build one anew would hold up a step, for a tenth of a second
    with 65,536 tokens. So while there are more tokens than half of `most`, new texts also go to a
    second collection. When that has more than half of `most`, it takes the place of the first one.
    For this both automata are in memory.
    """

    def __init__(self, most: int) -> None:
        assert most > 0
        self.most = most
        self.lock = RLock()
        self._kept = _Texts()
        self._newest = _Texts()  # what takes its place

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._kept.size

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Return the texts, oldest first."""
        return list(self._kept.texts)

    def clear(self) -> None:
        """Forget all texts."""
        kept = _Texts()
        newest = _Texts()
        with self.lock:
            self._kept, self._newest = kept, newest

    @property
    def automaton(self) -> Automaton:
        """Return the automaton of all texts' suffixes."""
        return self._kept.read()

    def read(self) -> None:
        """Let the automaton read the texts that were added since it was last asked for."""
        with self.lock:
            self._kept.read()
            self._newest.read()

    def add(self, tokens: Sequence[int]) -> None:
        """Add the last `most` tokens of a text. If that is too much, the oldest are forgotten."""
        text = tuple(tokens[-self.most :])
        if not text:
            return
        with self.lock:
            self._kept.add(text)
            half = self.most // 2
            size = self._kept.size
            if size > half:
                self._newest.add(text)
            if size > self.most or self._newest.size > half:
                fresh = _Texts()
                # No call comes between, so that no interrupt does.
                self._kept, self._newest = self._newest, fresh
                if self._kept.size > self.most:  # by a text of more than half
                    alone = _Texts()
                    alone.add(text)
                    self._kept = alone


class _Texts:
    """Texts, and the automaton of their suffixes.

    Attributes:
        texts: the keys of a dictionary, oldest first.
        unread: the texts that the automaton has not read.
    """

    def __init__(self) -> None:
        self.texts: dict[tuple[int, ...], None] = {}
        self.unread: list[tuple[int, ...]] = []
        # None during a change, which an exception may break off
        self._automaton: Automaton | None = Automaton()

    @property
    def size(self) -> int:
        """Return the number of tokens."""
        return sum(map(len, self.texts))

    def add(self, text: tuple[int, ...]) -> None:
        """Add a text, or make it the newest."""
        automaton = self._automaton
        self._automaton = None
        if text in self.texts:
            del self.texts[text]
        else:
            self.unread.append(text)
        self.texts[text] = None
        self._automaton = automaton

    def read(self) -> Automaton:
        """Return the automaton, which has read all texts."""
        automaton = self._automaton
        unread = self.unread
        if automaton is None:
            automaton = Automaton()
            unread = list(self.texts)
        self._automaton = None
        for text in unread:
            _read(automaton, text)
        self.unread = []
        self._automaton = automaton
        return automaton


def _read(automaton: Automaton, text: Sequence[int]) -> None:
    last = 0
    for token in text:
        last = automaton.extend(last, token)


Pool = PhrasePool | SuffixMemory
