"""Log probabilities of tokens by the target's own distribution, before any processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logprob:
    """A token, its log probability, and the most probable tokens in its place with theirs, the best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """The log probabilities of tokens [n] under logits [n, V], each with the `top` best in its place."""
    if not tokens:
        return []
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    if not top:
        return [Logprob(token, each) for token, each in zip(tokens, own, strict=True)]
    best, ids = logprobs.topk(min(top, logprobs.shape[-1]), -1)
    return [
        Logprob(token, each, tuple(zip(row, values, strict=True)))
        for token, each, row, values in zip(tokens, own, ids.tolist(), best.tolist(), strict=True)
    ]
