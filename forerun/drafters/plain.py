"""No draft at all: the target alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from forerun.draft import Draft
from forerun.engine import Proposal
from forerun.generation import Generation
from forerun.sampling import Verdict


class PlainDrafter:
    """Autoregressive decoding: every draft is the bare root."""

    wants_hidden = False
    spread = 0

    def admit(self, seq: Generation, hidden: Tensor | None, chunk: int) -> Iterable[int]:
        return ()

    def propose(self, seqs: list[Generation]) -> Proposal:
        return Proposal([Draft.root(seq.tokens[-1]) for seq in seqs])

    def observe(
        self, seqs: list[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: list[Tensor] | None
    ) -> None:
        pass

    def drop(self, seq: Generation) -> None:
        pass
