"""Plain decoding: the target alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal
from forerun.methods.base import Method, Parts

if TYPE_CHECKING:
    from forerun.engine.sequence import Sequence


@dataclass(frozen=True)
class AR(Method):
    """Plain autoregressive decoding, the baseline."""

    name: ClassVar[str] = "ar"

    def build(self, parts: Parts) -> Drafter:
        return PlainDrafter()


class PlainDrafter(Drafter):
    """Draft nothing."""

    def propose(self, seqs: list[Sequence]) -> Proposal:
        return Proposal([Draft.root(seq.tokens[-1]) for seq in seqs])
