"""Plain decoding: the target alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal

if TYPE_CHECKING:
    from forerun.engine.sequence import Sequence


class PlainDrafter(Drafter):
    """Draft nothing."""

    def propose(self, seqs: list[Sequence]) -> Proposal:
        """Return an empty draft for each sequence."""
        return Proposal([Draft.root(seq.tokens[-1]) for seq in seqs])
