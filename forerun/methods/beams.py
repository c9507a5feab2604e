"""Trees of the most probable paths, for heads with logits for each place ahead.

Trees grow as in EAGLE (arXiv 2401.15077), and nodes are chosen as in EAGLE-2 (arXiv 2406.16858)."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun.engine.draft import Draft

if TYPE_CHECKING:
    from forerun.methods.budget import Budget

# (depth k from 0, tokens of the beams [B, w], index of each beam's parent among the beams before [B, w]) -> logits
# [B, w, S] of the tokens after the beams.
Logits = Callable[[int, Tensor, Tensor], Tensor]
Array = np.ndarray[Any, Any]


_CLOSER = 1e-9  # subtracted at each place, so that a node never sorts before its parent if both have probability 1


@torch.inference_mode()
def grow(
    roots: abc.Sequence[int],
    logits: Logits,
    hot: Tensor,
    limits: abc.Sequence[int],
    width: int,
    nodes: int,
    budget: Budget | None = None,
    origins: abc.Sequence[str] = (),
) -> list[Draft]:
    """Return a tree of point masses for each row, at most `limits[r]` deep.

    It holds the `nodes` most probable paths that a search with `width` beams finds. One beam gives a chain of at most
    `nodes` tokens. `logits` is called once for each depth, for all rows and beams; `hot` [S] are its tokens. A `budget`
    calibrates probabilities and may end paths sooner.
    """
    depth = max(limits)
    if depth < 1:
        return [Draft.root(root) for root in roots]
    origins = origins or ["draft"] * len(roots)
    if width == 1:
        depth = min(depth, nodes)
        chains = _chains(roots, logits, hot, depth, budget)
        sizes = limits if budget is None else budget.sizes()
        found = zip(roots, chains.tolist(), sizes, origins, strict=True)
        return [Draft.chain(root, row[:size], origin=origin) for root, row, size, origin in found]
    tokens, parents, values = _paths(roots, logits, hot, limits, width, nodes, budget)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :nodes]
    counts = np.isfinite(np.take_along_axis(values, order, -1)).sum(-1).tolist()
    if budget is not None:
        counts = [min(pair) for pair in zip(counts, budget.sizes(), strict=True)]
    drafts = []
    for row, (root, size, origin) in enumerate(zip(roots, counts, origins, strict=True)):
        kept = np.sort(order[row, :size])  # parents first
        places = np.zeros(tokens.shape[1] + 1, dtype=np.int64)
        places[kept + 1] = np.arange(1, size + 1)
        own, above = tokens[row, kept].tolist(), places[parents[row, kept]].tolist()
        drafts.append(Draft([root, *own], [-1, *above], None, [origin] * (size + 1)))
    return drafts


def _chains(roots: abc.Sequence[int], logits: Logits, hot: Tensor, depth: int, budget: Budget | None) -> Tensor:
    """Return chains of argmax tokens [B, n], n at most `depth`."""
    tokens = torch.tensor(roots, device=hot.device)[:, None]
    at, chain, block = torch.zeros_like(tokens), [], []
    for k in range(depth):
        found = logits(k, tokens, at)
        tokens = hot[found.argmax(-1)]
        chain.append(tokens)
        if budget is not None:
            block.append(found)
            if len(block) == budget.block or k + 1 == depth:
                whole = torch.cat(block, 1).float()  # [B, n, S]
                logs = whole.amax(-1) - whole.logsumexp(-1)
                if not budget.deeper_chains(k + 1 - len(block), logs.tolist()):
                    break
                block = []
    return torch.cat(chain, 1)


def _paths(
    roots: abc.Sequence[int],
    logits: Logits,
    hot: Tensor,
    limits: abc.Sequence[int],
    width: int,
    nodes: int,
    budget: Budget | None,
) -> tuple[Array, Array, Array]:
    """Return tokens, parents and values (log-probabilities) [B, n] of all paths that the beams find, depth by depth.
    Parent 0 is the root, parent i is path i - 1."""
    # Small arrays are faster in NumPy. On a GPU each depth waits for its tokens.
    rows, at = len(roots), np.zeros((len(roots), 1), dtype=np.int64)
    tokens, beams, values = np.array(roots)[:, None], at, np.zeros((rows, 1))
    ends = np.array(limits)
    found: list[tuple[Array, Array, Array]] = []  # of each depth: tokens, parents and values [B, m]
    count = 1  # nodes so far, the root included
    for k in range(max(limits)):
        wanted = max(nodes - k, width)
        here = logits(k, torch.from_numpy(tokens).to(hot.device), torch.from_numpy(at).to(hot.device)).float()
        top, which = here.topk(min(wanted, len(hot)))  # [B, w, m]
        gains = (top - here.logsumexp(-1, keepdim=True)).cpu().numpy()
        if budget is not None:
            gains = budget.gains(k, gains)
        total = (gains + values[..., None] - _CLOSER).reshape(rows, -1)
        place = np.argsort(-total, axis=-1, kind="stable")[:, :wanted]
        best = np.take_along_axis(total, place, -1)
        best[ends <= k] = -np.inf
        token = np.take_along_axis(hot[which].cpu().numpy().reshape(rows, -1), place, -1)
        parent = place // which.shape[-1]
        found.append((token, np.take_along_axis(beams, parent, -1), best))
        tokens, values, at = token[:, :width], best[:, :width], parent[:, :width]
        beams = np.broadcast_to(np.arange(count, count + tokens.shape[1]), tokens.shape)
        count += token.shape[1]
        if budget is not None:
            going = budget.deeper(k, best)
            if not any(going):
                break
            ends = np.where(going, ends, np.minimum(ends, k + 1))
    tokens, parents, values = (np.concatenate(parts, -1) for parts in zip(*found, strict=True))
    return tokens, parents, values
