"""The acceptance rules. All are lossless: the output keeps the target's own distribution.

The rule for chains is that of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv
2302.01318). For trees the rule is applied child by child, each time to the residual (recursive
rejection sampling). A chain of sampled tokens may use block verification instead (Sun et al., arXiv
2403.10444), which accepts no fewer tokens. With a seed, the target's tokens are sampled by
`forerun.sampling.seeded`, and drafted tokens that equal them are accepted.
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
    tested: int  # number of accepted tokens, plus 1 if a token was rejected after them
    rejected: bool  # whether the last node of the path had children and none was accepted
    # [N] the target's most probable token after each node of the draft
    argmax: list[int] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        """Return the number of accepted tokens."""
        return len(self.path) - 1


def accept(
    draft: Draft, scores: Tensor, greedy: bool, generator: torch.Generator | None
) -> Verdict:
    """Return the verdict on a draft, given the target's processed scores [N, V] at its nodes.

    Greedy decoding compares drafted tokens with the argmax, not by ratios of probabilities.

    Sampling starts at a node with r = p, the target's distribution there. A child x sampled from q
    (one-hot for a point mass) is accepted if u * q(x) < r(x), where u is uniform on [0, 1).
    Otherwise r = norm(max(r - q, 0)) for the next child. After the last child, the next token is
    sampled from r.

    A draft with `block` that begins with a chain of sampled tokens is verified as one block. The
    length of that chain may depend on its tokens, as with any stop rule.
    """
    if greedy:
        return accept_greedy(draft, *best_of([scores]))
    return _accept_sampled(draft, scores.softmax(-1), generator)


def accept_seeded(draft: Draft, scores: Tensor, source: Callable[[int], Source]) -> Verdict:
    """Return the verdict on a draft by comparing it with the target's samples.

    The token after a node of depth d is sampled by `source(d)`, so that drafts do not change what
    is sampled.
    """
    argmax = argmax_of(scores).tolist()
    path = [0]
    while True:
        node = path[-1]
        token = sample(scores[node].softmax(-1), source(draft.depths[node]))
        child = _child(draft, node, token)
        if child is None:
            rejected = bool(draft.children[node])
            return Verdict(path, token, len(path) - 1 + rejected, rejected, argmax)
        path.append(child)


def accept_greedy(draft: Draft, argmax: list[int], highest: list[float]) -> Verdict:
    """Return the verdict on a draft by comparing it with the target's argmax at every node.

    Args:
        draft: the draft, of N nodes.
        argmax: [N] the target's most probable token at each node.
        highest: [N] the scores of these tokens.

    Raises:
        NotNumbersError: the highest score is NaN at a node where a token is chosen.
    """
    path = [0]
    while True:
        node = path[-1]
        if isnan(highest[node]):  # but infinite scores are allowed
            raise NotNumbersError("no token can be chosen: the model's scores are not numbers")
        child = _child(draft, node, argmax[node])
        if child is None:
            rejected = bool(draft.children[node])
            return Verdict(path, argmax[node], len(path) - 1 + rejected, rejected, argmax)
        path.append(child)


def _child(draft: Draft, node: int, token: int) -> int | None:
    """Return the first child of `node` with that token, or None."""
    for child in draft.children[node]:
        if draft.tokens[child] == token:
            return child
    return None


def _accept_sampled(draft: Draft, p: Tensor, generator: torch.Generator | None) -> Verdict:
    """Return the verdict on a draft, given the target's distributions [N, V] at its nodes."""
    u = torch.rand(len(draft), generator=generator, device=p.device).tolist()
    q, p_at, argmax = _read(draft, p)
    path = [0]
    if draft.is_block:
        ratios = [target / drafted for target, drafted in zip(p_at, q, strict=True)]
        count, residual = _accept_block(draft, p, u, ratios)
        path = list(range(count + 1))
        if residual is not None:
            return Verdict(path, sample(residual, generator), count + 1, True, argmax)
    while True:
        node = path[-1]
        accepted = None
        rejected: list[int] = []
        mass = 1.0  # of r before it is normalised: 1 minus the rejected point masses
        for child in draft.children[node]:
            if rejected and rejected[0] <= draft.sampled:
                r_child = float(_residual(draft, p[node], rejected)[draft.tokens[child]])
            else:
                r_child = p_at[child] / max(mass, 1e-30)
            if u[child] * q[child] < r_child:
                accepted = child
                break
            rejected.append(child)
            mass -= p_at[child]
        if accepted is None:
            token = sample(_residual(draft, p[node], rejected), generator)
            return Verdict(path, token, len(path) - 1 + bool(rejected), bool(rejected), argmax)
        path.append(accepted)


def _read(draft: Draft, p: Tensor) -> tuple[list[float], list[float], list[int]]:
    """Return three values for each node.

    They are the draft's and the target's probability of the node's token, and the target's most
    probable token after the node. Numbers are read one by one, because on a CPU this takes a fifth
    of the time of tensor operations.
    """
    target_probs = p.cpu().numpy()
    q = [1.0] * len(draft)  # as for point masses
    if draft.q is not None:
        draft_probs = draft.q.float().cpu().numpy()
        for i in range(draft.sampled):
            q[i + 1] = float(draft_probs[i, draft.tokens[i + 1]])
    p_at = [
        float(target_probs[max(parent, 0), token])
        for token, parent in zip(draft.tokens, draft.parents, strict=True)
    ]
    return q, p_at, target_probs.argmax(-1).tolist()


def _accept_block(
    draft: Draft, p: Tensor, u: list[float], ratios: list[float]
) -> tuple[int, Tensor | None]:
    """Verify the sampled chain as a block (arXiv 2403.10444, Algorithm 2).

    Return the number of accepted tokens, and the next token's distribution, which is not
    normalised. Instead of the distribution return None if all tokens are accepted.

    `ratios` are p / q of each node's token, and h_i = min(h_{i-1} p / q, 1). The last token passes
    with probability h_i, any other with S / (S + 1 - h_i), where S is the mass of max(h_i p - q, 0)
    after it. The longest prefix whose last token passes is accepted.
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
    # If p equals q, no mass is left, and only rounding made the rejection: then keep p.
    return accepted, rest[accepted] if mass[accepted] > 0.0 else p[accepted]


def _residual(draft: Draft, p: Tensor, rejected: list[int]) -> Tensor:
    """Return the residual [V] of the distribution p after these children were rejected in turn.

    Each rejection makes norm(max(p - q, 0)) of p. The q of a point mass is one-hot.
    """
    for child in rejected:
        if child <= draft.sampled:
            assert draft.q is not None
            rest = (p - draft.q[child - 1]).clamp_(min=0.0)
        else:
            rest = p.clone()
            rest[draft.tokens[child]] = 0.0
        total = rest.sum()
        # If p equals q, no mass is left, and only rounding made the rejection: then keep p.
        p = torch.where(total > 0.0, rest / total, p)
    return p
