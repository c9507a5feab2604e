"""Settings of suffix drafting (SuffixDecoding, arXiv 2411.04975)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forerun.methods.base import Method, flag, integer, number


@dataclass(frozen=True)
class Suffix(Method):
    """Draft what followed the text's longest repeated suffix, in the text or in earlier outputs.

    A draft has at most `factor` * match + `offset` tokens and at most `most`, and a probability of
    at least `least` by the counts (arXiv 2411.04975). If `warm`, up to `memory` tokens of earlier
    outputs are used; requests with a cache salt neither use nor add to them. If costs are known, a
    token in a batch must also be worth its place in the target's forward.

    The defaults are ours, for a CPU, where every verified token costs time. Elsewhere longer drafts
    pay.
    """

    factor: float = number(1.0, 0, 100)
    offset: float = number(0.0, 0, 100)
    most: int = integer(16)
    least: float = number(0.3, 0, 1)
    memory: int = integer(65536)
    warm: bool = flag(True)
    name: ClassVar[str] = "suffix"

    @property
    def phrases(self) -> tuple[int, int]:
        """Return the shape of the memory of outputs."""
        return 0, self.memory
