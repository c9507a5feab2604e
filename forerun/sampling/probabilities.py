"""Figures computed from scores [.., V]: the best token, and how probable tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def _is_numpy(scores: Tensor) -> bool:
    """Return whether NumPy can read the scores without a copy."""
    return scores.device.type == "cpu" and scores.dtype == torch.float32


def argmax_of(scores: Tensor) -> Tensor:
    """Return the argmax [..] of scores [.., V], the first of equal ones.

    On a CPU, NumPy's argmax takes a tenth of the time of torch's.
    """
    if _is_numpy(scores):
        return torch.from_numpy(np.asarray(scores.detach().numpy().argmax(-1)))
    return scores.argmax(-1)


def best_of(scores: Sequence[Tensor]) -> tuple[list[int], list[float]]:
    """Return the argmax of each row of several scores [N, V], and the score there.

    There is at least one tensor of scores. The score of a row with NaN is NaN. A GPU is waited for
    only once.
    """
    if all(map(_is_numpy, scores)):
        # With few calls, because after every forward their code is read from memory again.
        rows = [row for batch in scores for row in batch.detach().numpy()]
        tokens = [int(row.argmax()) for row in rows]
        return tokens, [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
    argmax = [batch.argmax(-1) for batch in scores]
    highest = [
        batch.gather(-1, index[:, None])[:, 0] for batch, index in zip(scores, argmax, strict=True)
    ]
    best, values = torch.stack([torch.cat(argmax).float(), torch.cat(highest).float()]).tolist()
    return [int(token) for token in best], values


def probabilities_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the probabilities [..] of tokens [..] under the softmax of scores [.., V]."""
    return scores.softmax(-1).gather(-1, tokens[..., None])[..., 0]


def last_probabilities(scores: Tensor, tokens: list[list[int]]) -> list[float]:
    """Return the probability of each row's last token: scores [R, V], tokens [R][n]."""
    ids = torch.tensor([row[-1] for row in tokens], device=scores.device)
    return probabilities_of(scores, ids).tolist()


@dataclass(frozen=True)
class Logprob:
    """A token with its log probability.

    Attributes:
        token: the token.
        logprob: its log probability.
        top: the most probable tokens at its position with their log probabilities, the best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Return the log probabilities of tokens [n] under logits [n, V].

    Each comes with the `top` most probable tokens at its position.
    """
    if not tokens:
        return []
    logprobs = logits.float().log_softmax(-1)
    ids = torch.tensor(tokens, device=logprobs.device)
    chosen = logprobs.gather(1, ids[:, None])[:, 0].tolist()
    best_values, best_ids = logprobs.topk(min(top, logprobs.shape[-1]), -1)
    rows = zip(tokens, chosen, best_ids.tolist(), best_values.tolist(), strict=True)
    return [
        Logprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in rows
    ]
