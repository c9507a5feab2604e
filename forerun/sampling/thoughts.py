"""What a chat template knows of an answer: its ends, and the thoughts before it.

It needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Thoughts:
    """The thoughts before an answer.

    Attributes:
        begin: the mark that begins them.
        close: the mark that ends them.
        is_open: whether the prompt has begun them.
        begin_token, close_token: the tokens of the marks; None for a mark of several tokens.
            `begin_token` is None also if the prompt has ended the thoughts.
        special: the texts of the marks that are special tokens, by their ids.
        budget: the most tokens of thoughts; None for no limit.
    """

    begin: str
    close: str
    is_open: bool
    begin_token: int | None
    close_token: int | None
    special: Mapping[int, str]
    budget: int | None = None

    def have_begun(self, output: Sequence[int]) -> bool:
        """Return whether the prompt or the first token of an output has begun thoughts."""
        return self.is_open or (len(output) > 0 and output[0] == self.begin_token)

    def count(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a step in thoughts are theirs, marks included."""
        return tokens.index(self.close_token) + 1 if self.close_token in tokens else len(tokens)


@dataclass(frozen=True)
class AnswerMarks:
    """What a chat template knows of an answer.

    Attributes:
        ends: tokens that end it, beside the model's own.
        thoughts: the thoughts before it; None if there are none to expect.
    """

    ends: frozenset[int] = frozenset()
    thoughts: Thoughts | None = None


NO_MARKS = AnswerMarks()
