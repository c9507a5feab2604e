"""Stop rules: when a chain of draft tokens is long enough."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.engine.acceptance import Verdict
    from forerun.engine.draft import Draft
    from forerun.engine.sequence import Sequence


@dataclass(frozen=True)
class DraftState:
    """What a rule sees after a drafted token: the sequences that still draft. All of them are at one depth.

    Attributes:
        seqs: the sequences.
        tokens: [R][depth] what each has drafted so far.
        scores: [R, V] processed scores that gave the last tokens.
        hidden: [R, d] the draft's LM-head inputs that gave them, where the policy wants them.
    """

    seqs: abc.Sequence[Sequence]
    tokens: list[list[int]]
    scores: Tensor
    hidden: Tensor | None = None

    @property
    def depth(self) -> int:
        return len(self.tokens[0])

    def part(self, rows: list[int]) -> DraftState:
        """Only these rows."""
        if len(rows) == len(self.tokens):
            return self
        hidden = self.hidden[rows] if self.hidden is not None else None
        tokens = [self.tokens[row] for row in rows]
        return DraftState([self.seqs[row] for row in rows], tokens, self.scores[rows], hidden)


@dataclass(frozen=True)
class Bounds:
    """A rule in numbers: at most `most` tokens; it ends with one that is less probable than `least`, or with which all
    are together less probable than `product`."""

    most: int
    least: float = 0.0
    product: float = 0.0


class StopRule(Protocol):
    """Decides about one draft. It is asked after every drafted token.

    It may stop after a token. It never discards a token that it has looked at: that would change the distribution the
    token was sampled from.
    """

    def more(self, state: DraftState) -> list[bool]:
        """Whether each row drafts on. A row that has stopped is not asked about again."""
        raise NotImplementedError

    def bounds(self) -> Bounds | None:
        """What it says of the first tokens of one row, where numbers can say it."""
        return None

    def bounds_after(self, seq: Sequence, drafted: list[int], probabilities: list[float]) -> Bounds | None:
        """What it says of the tokens after those of its bounds, by their probabilities; None: no more of them."""
        return None

    def min_more(self, depth: int) -> int:
        """How many more tokens, at least one, rows at `depth` draft whatever the tokens are."""
        return 1


class LengthPolicy(Protocol):
    """What is known of each sequence from draft to draft, keyed by its id; `begin` makes the rule of one draft.

    Attributes:
        wants_draft, wants_target: whether it needs the draft's and the target's hidden states.
    """

    wants_draft: bool = False
    wants_target: bool = False

    def admit(self, seq: Sequence) -> None:
        """A sequence joins."""
        return

    def drop(self, seq: Sequence) -> None:
        """A sequence leaves; nothing happens where it never joined."""
        return

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        """The rule of a draft of these sequences, which grow in step. `rows`: how many the target's forward has."""
        raise NotImplementedError

    def observe(
        self, seqs: abc.Sequence[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        """The verdicts on drafts; arguments as for a drafter."""
        return
