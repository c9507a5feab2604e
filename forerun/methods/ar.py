"""Plain decoding: no draft at all, the target alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forerun.draft import Draft
from forerun.methods.base import Method, Parts
from forerun.steps import Drafter, Proposal

if TYPE_CHECKING:
    from forerun.generation import Generation


@dataclass(frozen=True)
class AR(Method):
    """Plain autoregressive decoding, the baseline."""

    name: ClassVar[str] = "ar"

    def build(self, parts: Parts) -> Drafter:
        return PlainDrafter()


class PlainDrafter(Drafter):
    """Every draft is the bare root."""

    def propose(self, seqs: list[Generation]) -> Proposal:
        return Proposal([Draft.root(seq.tokens[-1]) for seq in seqs])
