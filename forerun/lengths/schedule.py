"""A length that follows from what became of the last draft."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.decode import Generation
from forerun.draft import Draft
from forerun.lengths import LengthPolicy, Look
from forerun.sampling import Verdict


class HeuristicSchedule(LengthPolicy):
    """The schedule "heuristic_transient" of transformers' assisted generation, for each row by itself: `gamma` tokens
    at first, two more behind a draft of which every token was accepted, else one fewer, at least one.

    Its "heuristic" differs in that lengths outlive a call; both start at 20. Ours: a draft without tokens changes
    nothing. Transformers also stops at improbable tokens (assistant_confidence_threshold), which is a rule of its own
    here: `forerun.lengths.confidence`.
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def start(self, seqs: Sequence[Generation]) -> None:
        self.lengths = [self.gamma] * len(seqs)

    def more(self, look: Look) -> list[bool]:
        return [look.depth < self.lengths[row] for row in look.rows]

    def certain(self, rows: Sequence[int], depth: int) -> int:
        return min(self.lengths[row] for row in rows) - depth

    def observe(self, drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None) -> None:
        for row, (draft, verdict) in enumerate(zip(drafts, verdicts, strict=True)):
            if draft.drafted and verdict.accepted == draft.drafted:
                self.lengths[row] += 2
            elif draft.drafted:
                self.lengths[row] = max(1, self.lengths[row] - 1)

    def keep(self, rows: list[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]
