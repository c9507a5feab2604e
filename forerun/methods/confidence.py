"""Stop rules by the draft model's own probabilities of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forerun.methods.base import Parts, integer, number
from forerun.methods.chain import Drafting
from forerun.methods.stop import Bounded, Bounds, LengthPolicy


@dataclass(frozen=True)
class Confidence(Drafting):
    """Draft until a token's own probability is below `threshold`.

    This is the rule of transformers' assistant_confidence_threshold, whose threshold starts at 0.4 and adapts; here it
    is fixed. A greedy token's probability is that of the softmax of its scores.
    """

    threshold: float = number(0.4, 0, 1)
    most: int = integer(32)
    name: ClassVar[str] = "confidence"

    def policy(self, parts: Parts) -> LengthPolicy:
        return Bounded(Bounds(self.most, least=self.threshold))


@dataclass(frozen=True)
class Cumulative(Drafting):
    """Draft until the product of the tokens' own probabilities is below `threshold`. The product estimates the
    probability that the whole draft is accepted. In greedy decoding the last token is not verified if the product is
    below `floor`; what a further token costs of a forward is a good one (ours)."""

    threshold: float = number(0.3, 0, 1)
    most: int = integer(32)
    floor: float = number(0.0, 0, 1)
    name: ClassVar[str] = "cumulative"

    def policy(self, parts: Parts) -> LengthPolicy:
        return Bounded(Bounds(self.most, product=self.threshold, floor=self.floor))
