"""Figures computed from scores [.., V]: the best token, and how probable tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.floating[Any]]


def _is_numpy(scores: Tensor) -> bool:
    """Return whether NumPy reads the scores without a copy."""
    return scores.device.type == "cpu" and scores.dtype == torch.float32


def argmax_of(scores: Tensor) -> Tensor:
    """Return the argmax [..] of scores [.., V], the first of equal ones.

    On a CPU, NumPy's argmax takes a tenth of the time of torch's.
    """
    if not _is_numpy(scores):
        return scores.argmax(-1)
    return torch.from_numpy(np.asarray(scores.detach().numpy().argmax(-1)))


def best_of(scores: Sequence[Tensor]) -> tuple[list[int], list[float]]:
    """Return the argmax of each row, and the score there, which is NaN if any score of the row is.

    Args:
        scores: one or more tensors [N, V]. A GPU is waited for once, however many there are.
    """
    # With few calls, because after every forward their code has to be read from memory again.
    if all(map(_is_numpy, scores)):
        rows = [row for part in scores for row in part.detach().numpy()]
        best = [int(row.argmax()) for row in rows]
        return best, [float(row[token]) for row, token in zip(rows, best, strict=True)]
    argmax = [part.argmax(-1) for part in scores]
    highest = []
    for part, best_tokens in zip(scores, argmax, strict=True):
        highest.append(part.gather(-1, best_tokens[:, None])[:, 0])
    tokens, values = torch.stack([torch.cat(argmax).float(), torch.cat(highest).float()]).tolist()
    return [int(token) for token in tokens], values


def probabilities_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the probabilities [..] of tokens [..] under the softmax of scores [.., V]."""
    return scores.softmax(-1).gather(-1, tokens[..., None])[..., 0]


def last_probabilities(scores: Tensor, tokens: list[list[int]]) -> list[float]:
    """Return the probability of each row's last token, by scores [R, V] and tokens [R][n]."""
    ids = torch.tensor([row[-1] for row in tokens], device=scores.device)
    return probabilities_of(scores, ids).tolist()


@dataclass(frozen=True)
class Logprob:
    """A token with its log probability.

    Attributes:
        token: the token.
        logprob: its log probability.
        top: the most probable tokens in its place with their log probabilities, the best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Return the log probabilities of tokens [n] under logits [n, V].

    Each comes with the `top` most probable tokens in its place.
    """
    if not tokens:
        return []
    logprobs = logits.float().log_softmax(-1)
    token_ids = torch.tensor(tokens, device=logprobs.device)
    of_tokens = logprobs.gather(1, token_ids[:, None])[:, 0].tolist()
    best, ids = logprobs.topk(min(top, logprobs.shape[-1]), -1)
    rows = zip(tokens, of_tokens, ids.tolist(), best.tolist(), strict=True)
    return [
        Logprob(token, logprob, tuple(zip(top_ids, top_values, strict=True)))
        for token, logprob, top_ids, top_values in rows
    ]
