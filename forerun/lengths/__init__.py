"""Length policies: when a chain of draft tokens is long enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.decode import Generation
from forerun.draft import Draft
from forerun.sampling import Verdict


@dataclass(frozen=True)
class Look:
    """What a policy sees behind a drafted token, of the rows that are still drafting. All stand at one depth.

    Attributes:
        rows: which sequences these are.
        tokens: [R][depth] what each has drafted so far.
        scores: [R, V] processed scores that gave the last tokens.
        hidden: [R, d] the draft's LM-head inputs that gave them, where the policy wants them.
    """

    rows: list[int]
    tokens: list[list[int]]
    scores: Tensor
    hidden: Tensor | None = None

    @property
    def depth(self) -> int:
        return len(self.tokens[0])


class LengthPolicy:
    """Asked behind every drafted token. It may stop after a token, never discard one that it has looked at: that would
    change the law the token was drawn from. Sequences go by position, as with drafters.

    Attributes:
        wants_draft, wants_target: whether it is to be shown the draft's and the target's hidden states.
    """

    wants_draft = False
    wants_target = False

    def start(self, seqs: Sequence[Generation]) -> None:
        """New sequences."""

    def more(self, look: Look) -> list[bool]:
        """Whether each row drafts on. Not asked of a row again in this draft once it has stopped."""
        raise NotImplementedError

    def certain(self, rows: Sequence[int], depth: int) -> int:
        """How many more tokens, at least one, rows that have `depth` are going to draft whatever they are. It is asked
        behind each all the same."""
        return 1

    def observe(self, drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None) -> None:
        """What became of the drafts; `hidden` [B, N, d] as a drafter is given it."""

    def keep(self, rows: list[int]) -> None:
        """Only these sequences go on, in this order."""


class FixedLength(LengthPolicy):
    """Exactly `gamma` tokens (Leviathan et al., arXiv 2211.17192)."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def more(self, look: Look) -> list[bool]:
        return [look.depth < self.gamma] * len(look.rows)

    def certain(self, rows: Sequence[int], depth: int) -> int:
        return self.gamma - depth
