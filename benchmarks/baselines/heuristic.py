"""Draft lengths that follow from the verdict on the last draft."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import ClassVar

from forerun.engine.sequence import Sequence
from forerun.engine.step import RowOutcome
from forerun.methods import Drafting, Parts
from forerun.methods.base import integer
from forerun.planning.stop_rules import Bounds, DraftState, LengthPolicy, StopRule


@dataclass(frozen=True)
class Heuristic(Drafting):
    """Drafts by transformers' schedule.

    It has `gamma` tokens at first, two more where all were accepted, else one fewer.
    """

    gamma: int = integer(5)
    name: ClassVar[str] = "heuristic"

    def policy(self, parts: Parts) -> LengthPolicy:
        return HeuristicSchedule(self.gamma)


class HeuristicSchedule(LengthPolicy):
    """The schedule "heuristic_transient" of transformers' assisted generation.

    Each sequence has its own length: `gamma` tokens at first, two more after a draft of which every
    token was accepted, else one fewer, but at least one. Transformers' "heuristic" differs in that
    lengths outlive a call; both start at 20 there. Ours: a draft without tokens changes nothing.
    Transformers also stops at improbable tokens (assistant_confidence_threshold), which is a
    separate rule here: `forerun.methods.Confidence`.
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.lengths: dict[int, int] = {}

    def admit(self, seq: Sequence) -> None:
        self.lengths[seq.id] = self.gamma

    def drop(self, seq: Sequence) -> None:
        self.lengths.pop(seq.id, None)

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        return _Lengths({seq.id: self.lengths[seq.id] for seq in seqs})

    def observe(self, outcomes: abc.Sequence[RowOutcome]) -> None:
        for outcome in outcomes:
            seq = outcome.sequence
            drafted = outcome.draft.drafted
            if not drafted:
                continue
            if outcome.verdict.accepted == drafted:
                self.lengths[seq.id] += 2
            else:
                self.lengths[seq.id] = max(1, self.lengths[seq.id] - 1)


class _Lengths(StopRule):
    """Stops each sequence at its own length."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def bounds(self) -> Bounds | None:
        return Bounds(next(iter(self.lengths.values()))) if len(self.lengths) == 1 else None

    def more(self, state: DraftState) -> list[bool]:
        return [state.depth < self.lengths[seq.id] for seq in state.seqs]
