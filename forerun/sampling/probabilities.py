"""Numbers read off scores [.., V]: the best token, and how probable tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def _is_numpy(scores: Tensor) -> bool:
    return scores.device.type == "cpu" and scores.dtype == torch.float32


def argmax_of(scores: Tensor) -> Tensor:
    """The argmax [..] of scores [.., V], the first of equal ones. On a CPU numpy's takes a tenth of torch's time."""
    return (
        torch.from_numpy(np.asarray(scores.detach().numpy().argmax(-1)))
        if _is_numpy(scores)
        else scores.argmax(-1)
    )


def best_of(scores: Sequence[Tensor]) -> tuple[list[int], list[float]]:
    """Of several scores [N, V], at least one, the argmax of each row, and the score there: NaN where any of the row's
    is. A GPU is waited for once."""
    if all(
        map(_is_numpy, scores)
    ):  # few calls, as their code is read from memory after every forward
        rows = [row for each in scores for row in each.detach().numpy()]
        best = [int(row.argmax()) for row in rows]
        return best, [float(row[token]) for row, token in zip(rows, best, strict=True)]
    argmax = [each.argmax(-1) for each in scores]
    highest = [
        each.gather(-1, best[:, None])[:, 0] for each, best in zip(scores, argmax, strict=True)
    ]
    tokens, values = torch.stack([torch.cat(argmax).float(), torch.cat(highest).float()]).tolist()
    return [int(token) for token in tokens], values


def probabilities_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Probabilities [..] of tokens [..] under the softmax of scores [.., V]."""
    return scores.softmax(-1).gather(-1, tokens[..., None])[..., 0]


def last_probabilities(scores: Tensor, tokens: list[list[int]]) -> list[float]:
    """The probability of each row's last token: scores [R, V], tokens [R][n]."""
    ids = torch.tensor([row[-1] for row in tokens], device=scores.device)
    return probabilities_of(scores, ids).tolist()


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
    best, ids = logprobs.topk(min(top, logprobs.shape[-1]), -1)
    return [
        Logprob(token, each, tuple(zip(row, values, strict=True)))
        for token, each, row, values in zip(tokens, own, ids.tolist(), best.tolist(), strict=True)
    ]
