"""Suffix drafts where they are likely to be right, another method's elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from forerun.draft import Draft
from forerun.drafters.guard import Guarded
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine import Drafter, Proposal
from forerun.generation import Generation
from forerun.sampling import Verdict
from forerun.steps import observe_rows


class HybridDrafter:
    """Asks the suffixes first. The other drafter is asked for those sequences whose suffix draft scores below
    `threshold`; to it, the others have simply grown. Where it has no draft, that of the suffixes stands.

    The other one may have a guard of its own, which then judges it by those steps that it drafted for all rows of. In a
    pause of the guard suffixes draft for all; its plain steps stay plain, as it measures what they cost.
    """

    def __init__(self, suffixes: SuffixDrafter, other: Drafter, threshold: float) -> None:
        self.suffixes, self.other, self.threshold = suffixes, other, threshold
        self.wants_hidden, self.spread = other.wants_hidden, max(suffixes.spread, other.spread)
        self.feature: str = getattr(other, "feature", "head")
        self._asked: set[int] = set()  # the sequences that the other one drafted for in this step

    def admit(self, seq: Generation, hidden: Tensor | None, chunk: int) -> Iterator[int]:
        yield from self.suffixes.admit(seq, hidden, chunk)
        yield from self.other.admit(seq, hidden, chunk)

    def propose(self, seqs: list[Generation]) -> Proposal:
        drafts: dict[int, Draft] = {}
        rest = []
        for seq in seqs:
            drafts[seq.id], score = self.suffixes.find(seq)
            if score < self.threshold or not drafts[seq.id].drafted:
                rest.append(seq)
        guard = self.other if isinstance(self.other, Guarded) else None
        if rest and guard is not None and guard.rests(rest):
            rest = []
        self._asked = {seq.id for seq in rest}
        proposal = Proposal([])
        if rest and guard is not None:
            proposal = guard.propose(rest, len(seqs))
        elif rest:
            proposal = self.other.propose(rest)
        for seq, draft in zip(rest, proposal.drafts, strict=True):
            if draft.drafted or (guard is not None and not guard.asked(seq)):
                drafts[seq.id] = draft
        return Proposal.together([drafts[seq.id] for seq in seqs], [proposal])

    def observe(
        self, seqs: list[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        # Hidden states come only once, so who wants them sees every step.
        rows = [row for row, seq in enumerate(seqs) if self.wants_hidden or seq.id in self._asked]
        observe_rows(self.other, rows, seqs, drafts, verdicts, hidden)
        self._asked = set()

    def drop(self, seq: Generation) -> None:
        self.suffixes.drop(seq)
        self.other.drop(seq)
