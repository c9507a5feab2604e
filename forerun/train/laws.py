"""What the target says about a place, kept short: its most probable tokens with their probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.train.parts import ROWS

MOST = 64  # tokens of a distribution; the others have next to nothing together


class Law(NamedTuple):
    """Distributions at n places.

    Attributes:
        tokens: [n, k] the most probable first.
        probabilities: [n, k] float32, which sum to nearly 1.
    """

    tokens: Tensor
    probabilities: Tensor

    def at(self, places: Tensor | slice) -> Law:
        return Law(self.tokens[places], self.probabilities[places])

    def within(self, hot: Tensor, vocabulary: int) -> Law:
        """The same with a token's number among `hot` [S] in its place; other tokens have the probability 0."""
        number = torch.full((vocabulary,), -1, device=hot.device)
        number[hot] = torch.arange(len(hot), device=hot.device)
        found = number[self.tokens]
        return Law(found.clamp(min=0), self.probabilities * (found >= 0))


@torch.no_grad()
def law_of(logits: Callable[[slice], Tensor], count: int) -> Law:
    """Distributions at `count` places; `logits` gives those [n, V] of some of them, as few as a cache holds."""
    law: Law | None = None
    for start in range(0, count, ROWS):
        part = slice(start, min(start + ROWS, count))
        found = logits(part).float()
        best, tokens = found.topk(min(MOST, found.shape[-1]))
        if law is None:
            # Room for all at once: small results between large ones would leave holes that nothing fits into, of
            # gigabytes in the end.
            room = tokens.new_empty(count, tokens.shape[1]), best.new_empty(count, tokens.shape[1])
            law = Law(*room)
        law.tokens[part], law.probabilities[part] = tokens, (best - found.logsumexp(-1, keepdim=True)).exp()
    return law or Law(torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, 1))


def cross_entropy(logits: Tensor, wanted: Law) -> Tensor:
    """The sum over logits [n, S] of the cross-entropy with distributions over the same tokens."""
    return -(wanted.probabilities * logits.log_softmax(-1).gather(-1, wanted.tokens)).sum()
