"""Stopping where the draft model itself finds its tokens improbable."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.generation import Generation
from forerun.lengths import Bounds, LengthPolicy, LengthRule, Look
from forerun.probabilities import last_probabilities


class ConfidenceStop(LengthPolicy, LengthRule):
    """Stops after a token whose draft probability is below `threshold`, and after `most` tokens.

    The rule of transformers' assistant_confidence_threshold. There the threshold starts at 0.4 and adapts, here it is
    fixed. The probability of a greedy token is that under the softmax of its scores.
    """

    def __init__(self, threshold: float, most: int) -> None:
        self.threshold, self.most = threshold, most

    def begin(self, seqs: Sequence[Generation], rows: int) -> LengthRule:
        return self

    def bounds(self) -> Bounds:
        return Bounds(self.most, least=self.threshold)

    def more(self, look: Look) -> list[bool]:
        if look.depth >= self.most:
            return [False] * len(look.tokens)
        return [probability >= self.threshold for probability in last_probabilities(look.scores, look.tokens)]


class CumulativeStop(LengthPolicy):
    """Stops when the product of the draft's own probabilities of its tokens is below `threshold`, and after `most`
    tokens. The product is the draft's estimate that its whole text is right."""

    def __init__(self, threshold: float, most: int) -> None:
        self.threshold, self.most = threshold, most

    def begin(self, seqs: Sequence[Generation], rows: int) -> LengthRule:
        return ProductRule(self.threshold, self.most)


class ProductRule(LengthRule):
    """`CumulativeStop` for one draft. With `together` above 1 that many rows stop together, by their mean product, in
    which rows that have ended count as 0."""

    def __init__(self, threshold: float, most: int, together: int = 1) -> None:
        self.threshold, self.most, self.together = threshold, most, together
        self.products: dict[int, float] = {}

    def bounds(self) -> Bounds:
        return Bounds(self.most, product=self.threshold * self.together)

    def more(self, look: Look) -> list[bool]:
        if look.depth >= self.most:
            return [False] * len(look.tokens)
        found = [
            self.products.get(seq.id, 1.0) * probability
            for seq, probability in zip(look.seqs, last_probabilities(look.scores, look.tokens), strict=True)
        ]
        self.products = {seq.id: product for seq, product in zip(look.seqs, found, strict=True)}
        if self.together > 1:
            return [sum(found) >= self.threshold * self.together] * len(found)
        return [product >= self.threshold for product in found]
