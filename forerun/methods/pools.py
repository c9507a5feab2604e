"""Pools that outlive a sequence, in bounded memory: phrases, and outputs of earlier requests."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

from forerun.methods.automaton import Automaton

KEYS = 16384  # the most tokens with phrases


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
    """The newest texts, of at most `most` tokens in all, and the automaton of their suffixes.

    A text that is added again is kept once, as the newest. Readers of the automaton must hold `lock`.
    """

    def __init__(self, most: int) -> None:
        assert most > 0
        self.most, self.lock = most, RLock()
        self.clear()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return sum(map(len, self._texts))

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Return the texts, oldest first."""
        return list(self._texts)

    def clear(self) -> None:
        with self.lock:
            self._automaton: Automaton | None = (
                Automaton()
            )  # None during a change, which an exception may break off
            self._texts: dict[tuple[int, ...], None] = {}

    @property
    def automaton(self) -> Automaton:
        """Return the automaton of all texts' suffixes."""
        if self._automaton is None:
            found = Automaton()
            for text in self._texts:
                _read(found, text)
            self._automaton = found
        return self._automaton

    def add(self, tokens: Sequence[int]) -> None:
        """Add the last `most` tokens of a text. If texts have more than `most` tokens, the oldest are forgotten, down
        to half of that, as the automaton is built anew then."""
        text = tuple(tokens[-self.most :])
        with self.lock:
            if text in self._texts:
                self._texts[text] = self._texts.pop(text)
            if not text or text in self._texts:
                return
            found, self._automaton, size = self.automaton, None, len(self) + len(text)
            self._texts[text] = None
            if size <= self.most:
                _read(found, text)
                self._automaton = found
                return
            while size > self.most // 2 and len(self._texts) > 1:
                oldest = next(iter(self._texts))
                del self._texts[oldest]
                size -= len(oldest)


def _read(automaton: Automaton, text: Sequence[int]) -> None:
    last = 0
    for token in text:
        last = automaton.extend(last, token)


Pool = PhrasePool | SuffixMemory
