"""What a target has committed, in the tokens of a draft with another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.prefix import common
from forerun.vocabularies import REACH, Translation


class Reader:
    """A sequence's text in the draft's tokens.

    As long as the target's tokens are the draft's as well, each is read as that. Where one is not, the text is cut anew
    from the beginning of its word.

    Attributes:
        tokens: the draft's tokens for all that was read.
    """

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self.tokens: list[int] = list(translation.draft.front)
        self._own: list[int] = []  # the target's tokens that were read
        self._ends = [len(self.tokens)]  # how many of ours stand for the first i of them; -1 where none ends there

    def read(self, tokens: Sequence[int]) -> bool:
        """Reads the target's tokens, in place of those that it has read and that differ. False where they end in half a
        character that the draft has no tokens for; then that is not read, nor what goes with it."""
        count = len(self._own)
        self._cut(count if list(tokens[:count]) == self._own else common(self._own, tokens))
        while len(self._own) < len(tokens):
            if not (self._read_one(tokens[len(self._own)]) or self._read_on(tokens)):
                return False
        return True

    def _cut(self, count: int) -> None:
        """Keeps the first `count` of the target's tokens, or fewer, up to where one of the draft's ends."""
        while self._ends[count] < 0:
            count -= 1
        del self._own[count:], self._ends[count + 1 :]
        del self.tokens[self._ends[count] :]

    def _read_one(self, token: int) -> bool:
        """Reads a token for which one of the draft's stands, or none: it has no text."""
        one, front = self.translation.reads.get(token), self.translation.draft.front
        if one is None and self.translation.target.of(token):
            return False
        begins = not self._own and front[-1:] == [one]  # the draft has put it there itself
        if one is not None and not begins:
            self.tokens.append(one)
        self._own.append(token)
        self._ends.append(len(self.tokens))
        return True

    def _read_on(self, tokens: Sequence[int]) -> bool:
        """Reads all tokens up to the next one without text, from the beginning of a word on."""
        target, draft = self.translation.target, self.translation.draft
        here = stop = len(self._own)
        while stop < len(tokens) and target.of(tokens[stop]):
            stop += 1
        self._cut(self._word(tokens, here))
        span = tokens[len(self._own) : stop]
        sizes = [len(target.of(token) or b"") for token in span]
        text = target.spell(span)
        found = self.translation.read(text)
        if found is None and stop < len(tokens):  # that character will never be whole
            found = draft.encode(text.decode("utf-8", "replace"))
        if found is None:
            return False
        ends = {}
        if draft.spell(found) == text:
            size = 0
            for count, token in enumerate(found, len(self.tokens) + 1):
                size += len(draft.of(token) or b"")
                ends[size] = count
        size = 0
        for each in sizes:
            size += each
            self._ends.append(ends.get(size, -1))
        self.tokens += found
        self._own += span
        self._ends[-1] = len(self.tokens)
        return True

    def _word(self, tokens: Sequence[int], here: int) -> int:
        """Where the word begins that the token `here` belongs to; `here` itself where that is too far back."""
        target = self.translation.target
        for at in range(here, max(here - REACH, 0) - 1, -1):
            if at < here and not target.of(tokens[at]):
                break
            if self._ends[at] >= 0 and target.begins_word(tokens, at):
                return at
        return here
