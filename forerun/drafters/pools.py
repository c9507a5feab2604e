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
    """

    def __init__(self, most: int) -> None:
        assert most > 0
        self.most = most
        self.lock = RLock()
        self._texts: dict[tuple[int, ...], None] = {}
        # None during a change, which an exception may break off
        self._automaton: Automaton | None = Automaton()
        self._unread: list[tuple[int, ...]] = []  # the texts that the automaton has not read

    def __len__(self) -> int:
        """Return the number of tokens."""
        return sum(map(len, self._texts))

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Return the texts, oldest first."""
        return list(self._texts)

    def clear(self) -> None:
        """Forget all texts."""
        with self.lock:
            self._automaton = None
            self._texts = {}
            self._unread = []

    @property
    def automaton(self) -> Automaton:
        """Return the automaton of all texts' suffixes."""
        automaton = self._automaton
        unread = self._unread
        if automaton is None:
            automaton = Automaton()
            unread = self.texts
        self._automaton = None
        for text in unread:
            _read(automaton, text)
        self._unread = []
        self._automaton = automaton
        return automaton

    def read(self) -> None:
        """Let the automaton read the texts that were added since it was last asked for."""
        with self.lock:
            _ = self.automaton

    def add(self, tokens: Sequence[int]) -> None:
        """Add the last `most` tokens of a text.

        If the texts have more than `most` tokens then, the oldest are forgotten, down to half of
        that, because the automaton is built anew in this case.
        """
        text = tuple(tokens[-self.most :])
        with self.lock:
            if text in self._texts:
                self._texts[text] = self._texts.pop(text)
            if not text or text in self._texts:
                return
            automaton = self._automaton
            self._automaton = None
            self._texts[text] = None
            self._unread.append(text)
            size = len(self)
            if size <= self.most:
                self._automaton = automaton
                return
            while size > self.most // 2 and len(self._texts) > 1:
                oldest = next(iter(self._texts))
                del self._texts[oldest]
                size -= len(oldest)
            self._unread = []  # because a new automaton reads all texts


def _read(automaton: Automaton, text: Sequence[int]) -> None:
    last = 0
    for token in text:
        last = automaton.extend(last, token)


Pool = PhrasePool | SuffixMemory
