"""Trees of the most probable paths, for heads with logits for each place ahead.

Trees grow as in EAGLE (arXiv 2401.15077). Nodes are chosen as in EAGLE-2 (arXiv 2406.16858).
"""

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

Array = np.ndarray[Any, Any]
# Returns the logits [B, w, S] of the tokens after the beams. Arguments: the depth k from 0, the
# tokens of the beams [B, w], and the index of each beam's parent among the beams before [B, w].
Logits = Callable[[int, Tensor, Tensor], Tensor]
# Returns the tokens, parents and values [B, m] of the paths of depth k + 1 with the largest values.
# A value is the sum of the logs of a path's probabilities. The first w paths are the next beams.
# Arguments: the depth k from 0, the tokens, parents and values [B, w] of the beams, and the depth
# at which each row ends [B].
Search = Callable[[int, Array, Array, Array, Array], tuple[Array, Array, Array]]

# Subtracted at each place, so that a node never sorts before its parent if both have probability 1.
_CLOSER = 1e-9


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
    """Return a tree of point masses for each row.

    It holds the `nodes` most probable paths that the search finds; one beam gives a chain.

    Args:
        roots: the rows' last tokens.
        search: finds the paths.
        limits: the greatest depth of each row.
        width: the number of beams.
        nodes: the most nodes of a row.
        plan: may end paths sooner.
        origin: of the tokens.
    """
    depth = max(limits)
    if depth < 1:
        return [Draft.root(root) for root in roots]
    tokens, parents, values = _paths(roots, search, limits, width, plan)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :nodes]
    counts = np.isfinite(np.take_along_axis(values, order, -1)).sum(-1).tolist()
    if plan is not None:
        counts = [min(pair) for pair in zip(counts, plan.sizes(), strict=True)]
    drafts = []
    for row, (root, size) in enumerate(zip(roots, counts, strict=True)):
        kept = np.sort(order[row, :size])  # parents first
        places = np.zeros(tokens.shape[1] + 1, dtype=np.int64)
        places[kept + 1] = np.arange(1, size + 1)
        row_tokens = tokens[row, kept].tolist()
        row_parents = places[parents[row, kept]].tolist()
        origins = [origin] * (size + 1)
        drafts.append(Draft([root, *row_tokens], [-1, *row_parents], None, origins))
    return drafts


def _paths(
    roots: abc.Sequence[int],
    search: Search,
    limits: abc.Sequence[int],
    width: int,
    plan: TreePlan | None,
) -> tuple[Array, Array, Array]:
    """Return tokens, parents and values [B, n] of all paths that are found, depth by depth.

    Parent 0 is the root, parent i is path i - 1.
    """
    tokens: Array = np.array(roots)[:, None]
    at: Array = np.zeros((len(roots), 1), dtype=np.int64)
    values: Array = np.zeros((len(roots), 1))
    ends: Array = np.array(limits)
    beams = at  # the places of the beams among all nodes, the root included
    by_depth: list[tuple[Array, Array, Array]] = []
    count = 1  # nodes so far, the root included
    for k in range(max(limits)):
        path_tokens, path_parents, path_values = search(k, tokens, at, values, ends)
        places = np.take_along_axis(beams, path_parents, -1)
        by_depth.append((path_tokens, places, path_values))
        tokens = path_tokens[:, :width]
        values = path_values[:, :width]
        at = path_parents[:, :width]
        beams = np.broadcast_to(np.arange(count, count + tokens.shape[1]), tokens.shape)
        count += path_tokens.shape[1]
        if plan is not None:
            going = plan.deeper(k, path_values)
            if not any(going):
                break
            ends = np.where(going, ends, np.minimum(ends, k + 1))
    all_tokens, all_places, all_values = zip(*by_depth, strict=True)
    return (
        np.concatenate(all_tokens, -1),
        np.concatenate(all_places, -1),
        np.concatenate(all_values, -1),
    )


def searching(
    logits: Logits, hot: Tensor, width: int, nodes: int, plan: TreePlan | None = None
) -> Search:
    """Return a search by `logits` for the tokens `hot` [S].

    A `plan` calibrates the probabilities. Small arrays are faster in NumPy. On a GPU each depth
    waits for its tokens.
    """
    wanted = nodes if width > 1 else 1

    def search(
        k: int, tokens: Array, at: Array, values: Array, ends: Array
    ) -> tuple[Array, Array, Array]:
        beam_tokens = torch.from_numpy(tokens).to(hot.device)
        beam_parents = torch.from_numpy(at).to(hot.device)
        scores = logits(k, beam_tokens, beam_parents).float()
        top, which = scores.topk(min(wanted, len(hot)))  # [B, w, m]
        gains = (top - scores.logsumexp(-1, keepdim=True)).cpu().numpy()
        if plan is not None:
            gains = plan.gains(k, gains)
        total = (gains + values[..., None] - _CLOSER).reshape(len(tokens), -1)
        place = np.argsort(-total, axis=-1, kind="stable")[:, :wanted]
        best = np.take_along_axis(total, place, -1)
        best[ends <= k] = -np.inf
        candidates = hot[which].cpu().numpy().reshape(len(tokens), -1)
        chosen = np.take_along_axis(candidates, place, -1)
        return chosen, place // which.shape[-1], best

    return search
