"""The acceptance rules. All are lossless: the output keeps the target's own distribution.

The rule for chains is that of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). For trees it is
applied child by child, each time to the residual (recursive rejection sampling). A chain of sampled tokens may use
block verification instead (Sun et al., arXiv 2403.10444), which accepts no fewer tokens. With a seed the target's
tokens are sampled by `forerun.sampling.seeded`, and equal drafted tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan

import torch
from torch import Tensor

from forerun.engine.draft import Draft
from forerun.failures import NotNumbersError
from forerun.sampling.probabilities import argmax_of, best_of
from forerun.sampling.sampler import Source, sample


@dataclass(frozen=True)
class Verdict:
    """The target's answer to a draft."""

    path: list[int]  # accepted nodes in order, the root first
    token: int  # the token after them: a correction if a child was rejected there, else a bonus
    tested: int  # accepted nodes, and the level of the first rejection
    rejected: bool  # whether the last node of the path had children and none was accepted
    argmax: list[int] = field(
        default_factory=list
    )  # the target's most probable token after every node of the draft

    @property
    def accepted(self) -> int:
        return len(self.path) - 1


def accept(
    draft: Draft, scores: Tensor, greedy: bool, generator: torch.Generator | None
) -> Verdict:
    """Return the verdict on a draft, given the target's processed scores [N, V] at its nodes.

    Greedy decoding compares with the argmax, not with ratios of probabilities. In sampling, r begins as the target's
    distribution p at a node. A child x sampled from q (one-hot for a point mass) is accepted if u * q(x) < r(x), else
    r = norm(max(r - q, 0)) for the next child. After the last child the next token is sampled from r.

    A draft with `block` that begins with a chain of sampled tokens is verified as one block. Its length may depend on
    its tokens, as with any stop rule.
    """
    if greedy:
        return accept_greedy(draft, *best_of([scores]))
    return _accept_sampled(draft, scores.softmax(-1), generator)


def accept_seeded(draft: Draft, scores: Tensor, source: Callable[[int], Source]) -> Verdict:
    """Return the verdict on a draft by comparing it with the target's samples; the token after depth d is sampled by
    `source(d)`. Drafts do not change what is sampled."""
    argmax, path = argmax_of(scores).tolist(), [0]
    while True:
        node = path[-1]
        token = sample(scores[node].softmax(-1), source(draft.depths[node]))
        child = next((c for c in draft.children[node] if draft.tokens[c] == token), None)
        if child is None:
            rejected = bool(draft.children[node])
            return Verdict(path, token, len(path) - 1 + rejected, rejected, argmax)
        path.append(child)


def accept_greedy(draft: Draft, argmax: list[int], highest: list[float]) -> Verdict:
    """Return the verdict on a draft by comparing it with the target's argmax at every node, given with its scores
    `highest`. Raises ValueError for NaN where a token is chosen."""
    path = [0]
    while True:
        node = path[-1]
        if isnan(highest[node]):  # infinities are allowed
            raise NotNumbersError("no token can be chosen: the model's scores are not numbers")
        child = next((c for c in draft.children[node] if draft.tokens[c] == argmax[node]), None)
        if child is None:
            rejected = bool(draft.children[node])
            return Verdict(path, argmax[node], len(path) - 1 + rejected, rejected, argmax)
        path.append(child)


def _accept_sampled(draft: Draft, p: Tensor, generator: torch.Generator | None) -> Verdict:
    u = torch.rand(len(draft), generator=generator, device=p.device).tolist()
    q, p_at, argmax = _read(draft, p)
    path = [0]
    if draft.is_block:
        count, left = _accept_block(draft, p, u, [a / b for a, b in zip(p_at, q, strict=True)])
        path = list(range(count + 1))
        if left is not None:
            return Verdict(path, sample(left, generator), count + 1, True, argmax)
    while True:
        node, accepted = path[-1], None
        rejected: list[int] = []
        mass = 1.0  # of r: 1 less the rejected point masses
        for child in draft.children[node]:
            if rejected and rejected[0] <= draft.sampled:
                here = float(_residual(draft, p[node], rejected)[draft.tokens[child]])
            else:
                here = p_at[child] / max(mass, 1e-30)
            if u[child] * q[child] < here:
                accepted = child
                break
            rejected.append(child)
            mass -= p_at[child]
        if accepted is None:
            token = sample(_residual(draft, p[node], rejected), generator)
            return Verdict(path, token, len(path) - 1 + bool(rejected), bool(rejected), argmax)
        path.append(accepted)


def _read(draft: Draft, p: Tensor) -> tuple[list[float], list[float], list[int]]:
    """Return of each node the draft's and the target's probability of its token, and the target's most probable token
    after it. On a CPU reading numbers one by one takes a fifth of the time of tensor operations."""
    probs, q = p.cpu().numpy(), [1.0] * len(draft)  # of a point mass
    if draft.q is not None:
        own = draft.q.float().cpu().numpy()
        q[1 : 1 + draft.sampled] = [
            float(own[i, draft.tokens[i + 1]]) for i in range(draft.sampled)
        ]
    p_at = [
        float(probs[max(parent, 0), token])
        for token, parent in zip(draft.tokens, draft.parents, strict=True)
    ]
    return q, p_at, probs.argmax(-1).tolist()


def _accept_block(
    draft: Draft, p: Tensor, u: list[float], ratios: list[float]
) -> tuple[int, Tensor | None]:
    """Return the number of accepted tokens of the sampled chain, and the next token's distribution, not normalised, or
    None if all are accepted (arXiv 2403.10444, Algorithm 2).

    `ratios` are p / q of each node's token, and h_i = min(h_{i-1} p / q, 1). The last token passes with probability
    h_i, any other with S / (S + 1 - h_i), where S is the mass of max(h_i p - q, 0) after it. The longest prefix whose
    last token passes is accepted.
    """
    hold = [1.0]
    for ratio in ratios[1 : draft.sampled + 1]:
        hold.append(min(hold[-1] * ratio, 1.0))
    last = draft.sampled
    if u[last] < hold[last]:
        return last, None
    assert draft.q is not None
    rest = torch.tensor(hold[:last], device=p.device, dtype=p.dtype)[:, None] * p[:last]
    rest = rest.sub_(draft.q).clamp_(min=0.0)
    mass = rest.sum(-1).tolist()
    kept = (i for i in reversed(range(1, last)) if u[i] * (mass[i] + 1.0 - hold[i]) < mass[i])
    accepted = next(kept, 0)
    # If p and q are equal, only rounding is left, and a rejection has probability 0.
    return accepted, rest[accepted] if mass[accepted] > 0.0 else p[accepted]


def _residual(draft: Draft, p: Tensor, rejected: list[int]) -> Tensor:
    """Return the residual [V] of the target's distribution after these children were rejected in turn: norm(max(p - q,
    0)) for each, where a point mass has the one-hot q of its token."""
    for child in rejected:
        if child <= draft.sampled:
            assert draft.q is not None
            rest = (p - draft.q[child - 1]).clamp_(min=0.0)
        else:
            rest = p.clone()
            rest[draft.tokens[child]] = 0.0
        total = rest.sum()
        # If p and q are equal, only rounding is left, and a rejection has probability 0: keep p.
        p = torch.where(total > 0.0, rest / total, p)
    return p
