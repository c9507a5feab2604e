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
    from forerun.planning.tree_plan import TreePlan

# (depth k from 0, tokens of the beams [B, w], index of each beam's parent among the beams before [B, w]) -> logits
# [B, w, S] of the tokens after the beams.
Logits = Callable[[int, Tensor, Tensor], Tensor]
Array = np.ndarray[Any, Any]
# (depth k from 0; tokens, parents as above, and values [B, w] of the beams; depth at which each row ends [B])
# -> tokens, parents and values [B, m] of the paths of depth k + 1 with the largest values, which are sums of the logs
# of their probabilities. The first w paths are the next beams.
Search = Callable[[int, Array, Array, Array, Array], tuple[Array, Array, Array]]

_CLOSER = 1e-9  # subtracted at each place, so that a node never sorts before its parent if both have probability 1


@torch.inference_mode()
def grow(
    roots: abc.Sequence[int],
    search: Search,
    limits: abc.Sequence[int],
    width: int,
    nodes: int,
    plan: TreePlan | None = None,
    origin: str = "draft",
) -> list[Draft]:
    """Return a tree of point masses for each row, at most `limits[r]` deep.

    It holds the `nodes` most probable paths that `search` finds with `width` beams; one beam gives a chain. A `plan`
    may end paths sooner.
    """
    depth = max(limits)
    if depth < 1:
        return [Draft.root(root) for root in roots]
    tokens, parents, values = _paths(roots, search, depth, limits, width, plan)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :nodes]
    counts = np.isfinite(np.take_along_axis(values, order, -1)).sum(-1).tolist()
    if plan is not None:
        counts = [min(pair) for pair in zip(counts, plan.sizes(), strict=True)]
    drafts = []
    for row, (root, size) in enumerate(zip(roots, counts, strict=True)):
        kept = np.sort(order[row, :size])  # parents first
        places = np.zeros(tokens.shape[1] + 1, dtype=np.int64)
        places[kept + 1] = np.arange(1, size + 1)
        own, above = tokens[row, kept].tolist(), places[parents[row, kept]].tolist()
        drafts.append(Draft([root, *own], [-1, *above], None, [origin] * (size + 1)))
    return drafts


def _paths(
    roots: abc.Sequence[int],
    search: Search,
    depth: int,
    limits: abc.Sequence[int],
    width: int,
    plan: TreePlan | None,
) -> tuple[Array, Array, Array]:
    """Return tokens, parents and values [B, n] of all paths that are found, depth by depth. Parent 0 is the root,
    parent i is path i - 1."""
    at = np.zeros((len(roots), 1), dtype=np.int64)
    tokens, beams, values, ends = (
        np.array(roots)[:, None],
        at,
        np.zeros((len(roots), 1)),
        np.array(limits),
    )
    found: list[tuple[Array, Array, Array]] = []
    count = 1  # nodes so far, the root included
    for k in range(depth):
        token, parent, best = search(k, tokens, at, values, ends)
        found.append((token, np.take_along_axis(beams, parent, -1), best))
        tokens, values, at = token[:, :width], best[:, :width], parent[:, :width]
        beams = np.broadcast_to(np.arange(count, count + tokens.shape[1]), tokens.shape)
        count += token.shape[1]
        if plan is not None:
            going = plan.deeper(k, best)
            if not any(going):
                break
            ends = np.where(going, ends, np.minimum(ends, k + 1))
    tokens, parents, values = (np.concatenate(parts, -1) for parts in zip(*found, strict=True))
    return tokens, parents, values


def searching(
    logits: Logits, hot: Tensor, width: int, nodes: int, plan: TreePlan | None = None
) -> Search:
    """Return a search by `logits` for the tokens `hot` [S], with probabilities that a `plan` calibrates."""
    wanted = nodes if width > 1 else 1

    def search(
        k: int, tokens: Array, at: Array, values: Array, ends: Array
    ) -> tuple[Array, Array, Array]:
        # Small arrays are faster in NumPy. On a GPU each depth waits for its tokens.
        here = logits(
            k, torch.from_numpy(tokens).to(hot.device), torch.from_numpy(at).to(hot.device)
        ).float()
        top, which = here.topk(min(wanted, len(hot)))  # [B, w, m]
        gains = (top - here.logsumexp(-1, keepdim=True)).cpu().numpy()
        if plan is not None:
            gains = plan.gains(k, gains)
        total = (gains + values[..., None] - _CLOSER).reshape(len(tokens), -1)
        place = np.argsort(-total, axis=-1, kind="stable")[:, :wanted]
        best = np.take_along_axis(total, place, -1)
        best[ends <= k] = -np.inf
        token = np.take_along_axis(hot[which].cpu().numpy().reshape(len(tokens), -1), place, -1)
        return token, place // which.shape[-1], best

    return search
