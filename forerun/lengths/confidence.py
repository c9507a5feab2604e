"""Stopping where the draft model itself finds its tokens improbable."""

from __future__ import annotations

import torch

from forerun.lengths import LengthPolicy, Look
from forerun.nn.pre_verifier import chances_of


class ConfidenceStop(LengthPolicy):
    """Stops behind a token whose draft probability is below `threshold`, and behind `most` tokens.

    The rule of transformers' assistant_confidence_threshold, there 0.4 at first and then adapted, here as it is given.
    """

    def __init__(self, threshold: float, most: int) -> None:
        self.threshold, self.most = threshold, most

    def more(self, look: Look) -> list[bool]:
        if look.depth >= self.most:
            return [False] * len(look.rows)
        return [probability >= self.threshold for probability in drawn(look)]


class CumulativeStop(LengthPolicy):
    """Stops when the product of the draft's own probabilities of its tokens is below `threshold`, and behind `most`
    tokens. The product is what the draft believes the chance of its whole text to be. So many rows as stop `together`
    go by its mean."""

    def __init__(self, threshold: float, most: int, together: int = 1) -> None:
        self.threshold, self.most, self.together = threshold, most, together
        self.products: dict[int, float] = {}  # of the rows of the present draft

    def more(self, look: Look) -> list[bool]:
        if look.depth >= self.most:
            return [False] * len(look.rows)
        before = self.products if look.depth > 1 else dict.fromkeys(look.rows, 1.0)
        self.products = {
            row: before[row] * probability for row, probability in zip(look.rows, drawn(look), strict=True)
        }
        if self.together > 1:
            return [sum(self.products.values()) >= self.threshold * self.together] * len(look.rows)
        return [product >= self.threshold for product in self.products.values()]


def drawn(look: Look) -> list[float]:
    """The probability [R] of each row's last token under the law it was drawn from; of a greedy one, under the softmax
    of its scores."""
    ids = torch.tensor([tokens[-1] for tokens in look.tokens], device=look.scores.device)
    return chances_of(look.scores, ids).tolist()
