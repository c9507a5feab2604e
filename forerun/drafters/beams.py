"""Trees of the most probable paths, for heads that give a law for each place ahead (arXiv 2401.15077 grows its tree so,
arXiv 2406.16858 chooses its nodes so)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from forerun.draft import Draft

# (depth k from 0, the beams' tokens [B, w], which of the beams before each comes from [B, w]) -> logits [B, w, S] of
# the tokens behind them.
Law = Callable[[int, Tensor, Tensor], Tensor]


class Choice(Protocol):
    """How deep trees grow and how many nodes they take."""

    def worth(self, k: int, chances: Tensor) -> Tensor:
        """What tokens with these log-probabilities at depth k add to the values of paths that hold them: the more, the
        likelier they are."""
        ...

    def more(self, k: int, values: Tensor) -> list[bool]:
        """Whether each row goes deeper than k + 1 places, given the values [B, m] of its paths of that length, the best
        one first; one that does not has -inf from then on."""
        ...

    def sizes(self, values: Tensor) -> list[int]:
        """How many of its best paths each row takes, given their values [B, N], the best one first."""
        ...


_CLOSER = 1e-9  # what a path loses a place, so that no node comes before its parent where both are certain


@torch.inference_mode()
def grow(
    roots: Sequence[int],
    law: Law,
    hot: Tensor,
    limits: Sequence[int],
    width: int,
    nodes: int,
    choice: Choice | None = None,
    origins: Sequence[str] = (),
) -> list[Draft]:
    """A tree for each row, at most `limits[r]` deep: the `nodes` paths with the largest products of probabilities among
    those that `width` beams find; for one beam a chain of the best tokens, `nodes` or fewer.

    Every depth is one pass over all rows and beams. `hot` [S] are the tokens that the laws are about. A `choice` values
    paths in its own way and may end them sooner.
    """
    depth = max(limits)
    if depth < 1:
        return [Draft.root(root) for root in roots]
    origins = origins or ["draft"] * len(roots)
    tokens = torch.tensor(roots, device=hot.device)[:, None]  # [B, w]
    if width == 1 and choice is None:
        at, chain = torch.zeros_like(tokens), []
        for k in range(min(depth, nodes)):
            tokens = hot[law(k, tokens, at).argmax(-1)]
            chain.append(tokens)
        found = zip(roots, torch.cat(chain, 1).tolist(), limits, origins, strict=True)
        return [Draft.chain(root, row[:limit], origin=origin) for root, row, limit, origin in found]
    rows = len(roots)
    values = torch.zeros(rows, 1, dtype=torch.float64, device=hot.device)
    at = beams = torch.zeros_like(tokens)
    ends = torch.tensor(limits, device=hot.device)[:, None]
    found_tokens, found_parents, found_values = [], [], []
    count = 1  # nodes so far, the root included
    for k in range(depth):
        logits = law(k, tokens, at).float()
        wanted = 1 if width == 1 else max(nodes - k, width)
        top, which = logits.topk(min(wanted, len(hot)))  # [B, w, m]
        gains = top - logits.logsumexp(-1, keepdim=True)
        if choice is not None:
            gains = choice.worth(k, gains)
        total = (gains + values[..., None] - _CLOSER).flatten(1)
        best, place = total.topk(min(wanted, total.shape[1]))
        best = best.masked_fill(ends <= k, -torch.inf)
        parent, token = place // which.shape[-1], hot[which.flatten(1).gather(1, place)]
        found_tokens.append(token)
        found_parents.append(beams.gather(1, parent))
        found_values.append(best)
        tokens, values, at = token[:, :width], best[:, :width], parent[:, :width]
        beams = torch.arange(count, count + tokens.shape[1], device=hot.device).expand(rows, -1)
        count += token.shape[1]
        if choice is not None and k + 1 < depth:
            going = choice.more(k, best)
            if not any(going):
                break
            ends = torch.where(torch.tensor(going, device=hot.device)[:, None], ends, ends.clamp(max=k + 1))
    values, order = torch.cat(found_values, 1).topk(min(nodes, count - 1))
    counts = values.isfinite().sum(-1).tolist()
    if choice is not None:
        counts = [min(pair) for pair in zip(counts, choice.sizes(values), strict=True)]
    # Their numbers by depth, each behind its parent: nodes that are not taken go behind all others.
    taken = torch.arange(values.shape[1], device=hot.device) < torch.tensor(counts, device=hot.device)[:, None]
    order = order.masked_fill(~taken, count - 1).sort(-1).values
    place = torch.zeros(rows, count + 1, dtype=torch.long, device=hot.device)
    place.scatter_(1, order + 1, torch.arange(1, order.shape[1] + 1, device=hot.device).expand_as(order))
    kept = order.clamp(max=count - 2)
    parents = place.gather(1, torch.cat(found_parents, 1).gather(1, kept))
    both = torch.stack([torch.cat(found_tokens, 1).gather(1, kept), parents]).tolist()
    return [
        Draft([root, *own[:size]], [-1, *above[:size]], None, [origin] * (size + 1))
        for root, own, above, size, origin in zip(roots, *both, counts, origins, strict=True)
    ]
