"""Stop rules by the draft model's own probabilities of its tokens."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forerun.methods.base import Parts, integer, number
from forerun.methods.chain import Drafting
from forerun.methods.later import probabilities
from forerun.methods.stop import Bounds, DraftState, Fixed, LengthPolicy, StopRule

if TYPE_CHECKING:
    from forerun.engine.sequence import Sequence


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
        return ConfidenceStop(self.threshold, self.most)


@dataclass(frozen=True)
class Cumulative(Drafting):
    """Draft until the product of the tokens' own probabilities is below `threshold`. The product estimates the
    probability that the whole draft is accepted."""

    threshold: float = number(0.3, 0, 1)
    most: int = integer(32)
    name: ClassVar[str] = "cumulative"

    def policy(self, parts: Parts) -> LengthPolicy:
        return CumulativeStop(self.threshold, self.most)


class ConfidenceStop(Fixed):
    def __init__(self, threshold: float, most: int) -> None:
        self.threshold, self.most = threshold, most

    def bounds(self) -> Bounds:
        return Bounds(self.most, least=self.threshold)

    def more(self, state: DraftState) -> list[bool]:
        if state.depth >= self.most:
            return [False] * len(state.tokens)
        last = probabilities.last_probabilities(state.scores, state.tokens)
        return [each >= self.threshold for each in last]


class CumulativeStop(LengthPolicy):
    def __init__(self, threshold: float, most: int) -> None:
        self.threshold, self.most = threshold, most

    def begin(self, seqs: abc.Sequence[Sequence], rows: int) -> StopRule:
        return ProductRule(self.threshold, self.most)


class ProductRule(StopRule):
    """The rule of `cumulative` for one draft. With `together` above 1, `together` rows stop together, by their mean
    product, in which ended rows count as 0."""

    def __init__(self, threshold: float, most: int, together: int = 1) -> None:
        self.threshold, self.most, self.together = threshold, most, together
        self.products: dict[int, float] = {}

    def bounds(self) -> Bounds:
        return Bounds(self.most, product=self.threshold * self.together)

    def more(self, state: DraftState) -> list[bool]:
        if state.depth >= self.most:
            return [False] * len(state.tokens)
        last = probabilities.last_probabilities(state.scores, state.tokens)
        found = [self.products.get(seq.id, 1.0) * each for seq, each in zip(state.seqs, last, strict=True)]
        self.products = {seq.id: product for seq, product in zip(state.seqs, found, strict=True)}
        if self.together > 1:
            return [sum(found) >= self.threshold * self.together] * len(found)
        return [product >= self.threshold for product in found]
