"""One drafter for greedy sequences and one for sampled sequences, in one engine."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from forerun.engine.acceptance import Verdict
from forerun.engine.draft import Draft
from forerun.engine.sequence import Sequence
from forerun.engine.step import Drafter, Proposal, observe_rows


class Split(Drafter):
    """Pass each sequence to the drafter of its mode. In a step with both modes, both draft."""

    def __init__(self, greedy: Drafter, sampled: Drafter) -> None:
        self.drafters = {True: greedy, False: sampled}
        self.wants_hidden = greedy.wants_hidden or sampled.wants_hidden
        self.spread = max(greedy.spread, sampled.spread)

    def admit(self, seq: Sequence, hidden: Tensor | None, chunk: int) -> Iterable[int]:
        drafter = self.drafters[seq.greedy]
        return drafter.admit(seq, hidden if drafter.wants_hidden else None, chunk)

    def pays(self, rows: int, unread: Sequence | None = None) -> bool:
        if unread is not None:
            return self.drafters[unread.greedy].pays(rows, unread)
        return any(each.pays(rows) for each in self.drafters.values())

    def propose(self, seqs: list[Sequence]) -> Proposal:
        drafts: dict[int, Draft] = {}
        proposals = []
        for greedy, drafter in self.drafters.items():
            own = [seq for seq in seqs if seq.greedy == greedy]
            if own:
                proposals.append(drafter.propose(own))
                drafts |= zip([seq.id for seq in own], proposals[-1].drafts, strict=True)
        return Proposal.together([drafts[seq.id] for seq in seqs], proposals)

    def observe(
        self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        for greedy, drafter in self.drafters.items():
            own = [row for row, seq in enumerate(seqs) if seq.greedy == greedy]
            observe_rows(drafter, own, seqs, drafts, verdicts, hidden if drafter.wants_hidden else None)

    def drop(self, seq: Sequence) -> None:
        self.drafters[seq.greedy].drop(seq)
