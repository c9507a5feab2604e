"""Trees of the most probable paths, for heads that give a law for each place ahead (arXiv 2401.15077 grows its tree so,
arXiv 2406.16858 chooses its nodes so)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.draft import Draft

# (depth k from 0, the beams' tokens [B, w], which of the beams before each comes from [B, w]) -> logits [B, w, S] of
# the tokens behind them.
Law = Callable[[int, Tensor, Tensor], Tensor]
Array = np.ndarray[Any, Any]


class Choice(Protocol):
    """How deep trees grow and how many nodes they take.

    Attributes:
        block: how many places a chain grows by before it is asked whether to go on.
    """

    block: int

    def worth(self, k: int, chances: Array) -> Array:
        """What tokens with these log-probabilities [B, w, m] at depth k add to the values of paths that hold them: the
        more, the likelier they are."""
        ...

    def more(self, k: int, values: Array) -> list[bool]:
        """Whether each row goes deeper than k + 1 places, given the values [B, m] of its paths of that length, the best
        one first; one that does not has -inf from then on."""
        ...

    def further(self, k: int, chances: list[list[float]]) -> bool:
        """The same of chains, for any row, given the log-probabilities [B, n] of their tokens at depths k and on."""
        ...

    def sizes(self) -> list[int]:
        """How many of its best paths each row takes."""
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
    if width == 1:
        chains = _chains(roots, law, hot, min(depth, nodes), choice).tolist()
        sizes = limits if choice is None else choice.sizes()
        found = zip(roots, chains, sizes, origins, strict=True)
        return [Draft.chain(root, row[:size], origin=origin) for root, row, size, origin in found]
    tokens, parents, values = _paths(roots, law, hot, limits, width, nodes, choice)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :nodes]
    counts = np.isfinite(np.take_along_axis(values, order, -1)).sum(-1).tolist()
    if choice is not None:
        counts = [min(pair) for pair in zip(counts, choice.sizes(), strict=True)]
    drafts = []
    for row, (root, size, origin) in enumerate(zip(roots, counts, origins, strict=True)):
        kept = np.sort(order[row, :size])  # each behind its parent
        places = np.zeros(tokens.shape[1] + 1, dtype=np.int64)
        places[kept + 1] = np.arange(1, size + 1)
        own, above = tokens[row, kept].tolist(), places[parents[row, kept]].tolist()
        drafts.append(Draft([root, *own], [-1, *above], None, [origin] * (size + 1)))
    return drafts


def _chains(roots: Sequence[int], law: Law, hot: Tensor, depth: int, choice: Choice | None) -> Tensor:
    """The best tokens [B, n], one behind the other, `depth` of them or fewer."""
    tokens = torch.tensor(roots, device=hot.device)[:, None]
    at, chain, said = torch.zeros_like(tokens), [], []
    for k in range(depth):
        logits = law(k, tokens, at)
        tokens = hot[logits.argmax(-1)]
        chain.append(tokens)
        if choice is not None:
            said.append(logits)
            if len(said) == choice.block or k + 1 == depth:
                block = torch.cat(said, 1).float()  # [B, n, S]
                chances = block.amax(-1) - block.logsumexp(-1)
                if not choice.further(k + 1 - len(said), chances.tolist()):
                    break
                said = []
    return torch.cat(chain, 1)


def _paths(
    roots: Sequence[int],
    law: Law,
    hot: Tensor,
    limits: Sequence[int],
    width: int,
    nodes: int,
    choice: Choice | None,
) -> tuple[Array, Array, Array]:
    """Tokens, parents and values [B, n] of all paths that the beams find, depth by depth. A parent of 0 is the root,
    one of i the path i - 1."""
    # Arrays this small take NumPy a fraction of torch's time; on a GPU every depth waits for its best tokens.
    rows, at = len(roots), np.zeros((len(roots), 1), dtype=np.int64)
    tokens, beams, values = np.array(roots)[:, None], at, np.zeros((rows, 1))
    ends = np.array(limits)
    found: list[tuple[Array, Array, Array]] = []  # of each depth tokens, parents and values [B, m]
    count = 1  # nodes so far, the root included
    for k in range(max(limits)):
        wanted = max(nodes - k, width)
        logits = law(k, torch.from_numpy(tokens).to(hot.device), torch.from_numpy(at).to(hot.device)).float()
        top, which = logits.topk(min(wanted, len(hot)))  # [B, w, m]
        gains = (top - logits.logsumexp(-1, keepdim=True)).cpu().numpy()
        if choice is not None:
            gains = choice.worth(k, gains)
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
        if choice is not None:
            going = choice.more(k, best)
            if not any(going):
                break
            ends = np.where(going, ends, np.minimum(ends, k + 1))
    tokens, parents, values = (np.concatenate(parts, -1) for parts in zip(*found, strict=True))
    return tokens, parents, values
