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
    """What a rule sees after a drafted token: the sequences that still draft, all of them at one depth.

    Attributes:
        tokens: [R][depth] what each has drafted so far.
        scores: [R, V] processed scores that the last tokens were chosen by.
        hidden: [R, d] the draft's LM-head inputs that gave them, if the policy wants them.
    """

    seqs: abc.Sequence[Sequence]
    tokens: list[list[int]]
    scores: Tensor
    hidden: Tensor | None = None

    @property
    def depth(self) -> int:
        return len(self.tokens[0])

    def part(self, rows: list[int]) -> DraftState:
        """Return the state of these rows alone."""
        if len(rows) == len(self.tokens):
            return self
        hidden = self.hidden[rows] if self.hidden is not None else None
        tokens = [self.tokens[row] for row in rows]
        return DraftState([self.seqs[row] for row in rows], tokens, self.scores[rows], hidden)


@dataclass(frozen=True)
class Bounds:
    """A rule in numbers: at most `most` tokens. The draft ends with a token less probable than `least`, or with one
    that makes all of them together less probable than `product`."""

    most: int
    least: float = 0.0
    product: float = 0.0


class StopRule(Protocol):
    """Decides about one draft. It is asked after every drafted token.

    It may stop after a token. It never discards a token that it has looked at: that would change the distribution the
    token was sampled from.
    """

    def more(self, state: DraftState) -> list[bool]:
        """Return whether each row drafts on. A row that has stopped is not asked about again."""
        raise NotImplementedError

    def bounds(self) -> Bounds | None:
        """Return the rule for the first tokens of one row, if numbers can express it."""
        return None

    def bounds_after(self, seq: Sequence, drafted: list[int], probabilities: list[float]) -> Bounds | None:
        """Return the rule for the tokens after those of its bounds, given their probabilities; None to stop."""
        return None

    def min_more(self, depth: int) -> int:
        """Return how many more tokens, at least one, rows at `depth` draft whatever the tokens are."""
        return 1


class LengthPolicy(Protocol):
    """What is known of each sequence from draft to draft, by its id; `begin` makes the rule of one draft.

    Attributes:
        wants_draft: whether it needs the draft's hidden states.
    """

    wants_draft: bool = False

    def admit(self, seq: Sequence) -> None:
        """Add a sequence."""
        return

    def drop(self, seq: Sequence) -> None:
        """Remove a sequence, if it was added."""
        return

    def pays(self, rows: int) -> bool:
        """See `Drafter.pays`."""
        return True

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        """Return the rule of a draft of these sequences, which grow in step. `rows`: those of the target's forward."""
        raise NotImplementedError

    def observe(self, seqs: abc.Sequence[Sequence], drafts: list[Draft], verdicts: list[Verdict]) -> None:
        """Record the verdicts on drafts."""
        return


class Fixed(LengthPolicy, StopRule):
    """A policy with one rule for every draft: itself."""

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        return self
