"""No draft at all: the target alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.decode import Generation, Proposal
from forerun.draft import Draft
from forerun.sampling import Verdict


class PlainDrafter:
    """Autoregressive decoding: every draft is the bare root."""

    wants_hidden = False

    def start(self, seqs: Sequence[Generation], hidden: Tensor | None = None) -> None:
        pass

    def propose(self, seqs: Sequence[Generation]) -> Proposal:
        return Proposal([Draft.root(seq.tokens[-1]) for seq in seqs])

    def observe(
        self, seqs: Sequence[Generation], drafts: list[Draft], verdicts: list[Verdict], hidden: Tensor | None
    ) -> None:
        pass

    def keep(self, rows: list[int]) -> None:
        pass
