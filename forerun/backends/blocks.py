"""Attention at fixed shapes: what a query gets has the same bits whatever else is asked in the same forward.

Torch's attention kernel rounds otherwise when its shape changes. So it is called for four queries, padded where there
are fewer, and 256 keys at a time, of which a query sees the first ones. What several calls give is weighed by their
sums of exponentials. Position p always stands in slot p: the nodes of a tree are asked path by path, each time with the
path's keys behind the text. That is our choice; a mask over a tree's own order is faster and rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forerun.model.batch import Inputs, additive, pack_rows
from forerun.model.kv_cache import BLOCK, KVCache

TOGETHER = 4  # queries
_LANES = 64  # numbers that any processor's registers hold a whole number of times


@dataclass(frozen=True)
class Round:
    """Queries of one path of each row, whose keys are put behind its text first.

    Attributes:
        path: [B, P] which new entries, by their places behind the text; rows with shorter ones repeat their last.
        slots: [B, P] where their keys and values go.
        asked: [B, Q] which new entries ask.
        masks: additive [B, Q / 4, end / 256, 4 g, 256], of full and of sliding layers.
    """

    path: Tensor
    slots: Tensor
    asked: Tensor
    masks: dict[bool, Tensor]


@dataclass(frozen=True)
class BlockBatch:
    """The first B rows of a cache with N new entries each, padding among them.

    Attributes:
        ids: [B, N] tokens.
        positions: [B, N].
        masks: of chains, as `Round` has them with Q = N rounded up.
        rounds: of trees.
        back: [B, N] of trees: where, among what all rounds ask, each new entry's own query stands.
    """

    ids: Tensor
    positions: Tensor
    masks: dict[bool, Tensor]
    rounds: Sequence[Round] = ()
    back: Tensor | None = None


def lay_out_blocks(inputs: Inputs, cache: KVCache, heads: int, sliding: dict[bool, int | None]) -> BlockBatch:
    """A batch of these entries. Tells the cache where they will go.

    heads: that share keys, g.
    sliding: of full layers (False) and sliding ones (True), as far as there are any, how far they see back; None for
        everything.
    """
    rows, size, new = inputs.rows, inputs.size, inputs.new
    lengths = cache.lengths[:size]
    start = max(lengths)
    end = -(-(start + new) // BLOCK) * BLOCK
    even = all(lengths[row] == start for row in rows)
    if len(rows) == size == 1 and inputs.masks is None and inputs.tokens is not None:
        ids, positions = torch.tensor(inputs.tokens), torch.arange(start, start + new)[None]
    else:
        whole = torch.tensor(pack_rows(inputs, lengths))
        ids, positions = whole[:, 1 : 1 + new], whole[:, 1 + new :]
        ids = ids if inputs.given is None else inputs.pad(inputs.given)
    slots = None if even else torch.tensor(lengths)[:, None] + torch.arange(new)
    cache.begin(size, start, end, slots)
    every = torch.arange(end)

    def masks(places: Tensor) -> dict[bool, Tensor]:
        """Of queries at places [B, Q]."""
        found = {}
        for kind, window in sliding.items():
            seen = every <= places[..., None]
            if window is not None:
                seen &= every > places[..., None] - window
            mask = additive(seen, torch.bfloat16)[:, 0].view(size, -1, TOGETHER, end // BLOCK, BLOCK).transpose(2, 3)
            found[kind] = mask.repeat_interleave(heads, 3)
        return found

    if inputs.masks is None:
        short = -new % TOGETHER
        places = positions if not short else torch.cat([positions, positions[:, -1:].expand(-1, short)], 1)
        return BlockBatch(ids, positions, masks(places))
    asked = _rounds(inputs)
    count = max(map(len, asked))
    back = torch.zeros(size, new, dtype=torch.long)
    rounds, behind = [], 0
    for number in range(count):
        # Rows that are done, and rows that only fill up, ask what they asked before.
        mine = {row: own[min(number, len(own) - 1)] for row, own in zip(rows, asked, strict=True)}
        longest = max(len(path) for path, _ in mine.values())
        widest = -(-max(len(nodes) for _, nodes in mine.values()) // TOGETHER) * TOGETHER
        paths, queries = torch.zeros(size, longest, dtype=torch.long), torch.zeros(size, widest, dtype=torch.long)
        for place, (row, (path, nodes)) in enumerate(mine.items()):
            paths[row] = torch.tensor([*path, *path[-1:] * (longest - len(path))])
            queries[row] = torch.tensor([*nodes, *nodes[-1:] * (widest - len(nodes))])
            if number < len(asked[place]):
                back[row, torch.tensor(nodes)] = behind + torch.arange(len(nodes))
        behind += widest
        where = torch.tensor(lengths)[:, None] + torch.arange(longest)
        rounds.append(Round(paths, where, queries, masks(positions.gather(1, queries))))
    return BlockBatch(ids, positions, {}, rounds, back)


def _rounds(inputs: Inputs) -> list[list[tuple[list[int], list[int]]]]:
    """Of each row its paths from the root to a leaf, with those nodes of each that are on no path before it."""
    assert inputs.masks is not None
    found = []
    for mask in inputs.masks:
        seen = mask[:, -len(mask) :].tolist()
        ancestors = [[node for node, sees in enumerate(row) if sees] for row in seen]
        inner = {node for own in ancestors for node in own[:-1]}
        done: set[int] = set()
        paths = []
        for leaf, path in enumerate(ancestors):
            if leaf not in inner:
                paths.append((path, [node for node in path if node not in done]))
                done.update(path)
        found.append(paths)
    return found


def attend(queries: Tensor, heads: int, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention [B N, H D] of the first `heads` of [B, N, .., D], which are queries, over keys [B, G, .., D], with a
    mask as `Round` has it."""
    rows, new, _, size = queries.shape
    groups, blocks, parts = keys.shape[1], mask.shape[1], mask.shape[2]
    shared = heads // groups
    if new == 1 and rows == 1:
        # One operation instead of four: the lone query four times.
        asked = queries.as_strided((1, groups, TOGETHER, shared, size), (0, shared * size, 0, size, 1))
        asked = asked.contiguous().view(1, 1, groups, TOGETHER * shared, size)  # strides of 0 are rounded otherwise
    else:
        queries, short = queries[:, :, :heads], blocks * TOGETHER - new
        padded = functional.pad(queries, (0, 0, 0, 0, 0, short)) if short else queries
        asked = padded.reshape(rows, blocks, TOGETHER, groups, shared, size).transpose(2, 3)
        asked = asked.contiguous().view(rows, blocks, groups, TOGETHER * shared, size)
    if rows == blocks == parts == 1:
        found = _call(asked[0], keys.narrow(2, 0, BLOCK), values.narrow(2, 0, BLOCK), mask[0, 0])[0]
    else:
        found = _parts(asked, keys, values, mask)
    found = found.view(rows, blocks, groups, TOGETHER, shared, size).transpose(2, 3).flatten(1, 2)
    return found[:, :new].reshape(rows * new, heads * size)


def _parts(asked: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention [B, Q / 4, G, 4 g, D] for queries of this shape."""
    rows, blocks, parts, *_ = mask.shape
    keys, values = (
        each.narrow(2, 0, parts * BLOCK).unflatten(2, (parts, BLOCK)).transpose(1, 2) for each in (keys, values)
    )
    # A call has one dimension for what is asked side by side.
    if rows == 1 and blocks <= parts:
        calls = [_call(asked[0, j].expand(parts, -1, -1, -1), keys[0], values[0], mask[0, j]) for j in range(blocks)]
        found, sums = (torch.stack(each, 1) for each in zip(*calls, strict=True))  # [parts, B * Q / 4, ..]
    elif rows == 1:
        calls = [
            _call(
                asked[0], keys[:, i].expand(blocks, -1, -1, -1), values[:, i].expand(blocks, -1, -1, -1), mask[0, :, i]
            )
            for i in range(parts)
        ]
        found, sums = (torch.stack(each) for each in zip(*calls, strict=True))
    else:
        calls = [
            _call(asked[:, j], keys[:, i], values[:, i], mask[:, j, i]) for i in range(parts) for j in range(blocks)
        ]
        found, sums = (
            torch.stack(each).unflatten(0, (parts, blocks)).transpose(1, 2).flatten(1, 2)
            for each in zip(*calls, strict=True)
        )
    if parts == 1:
        return found[0].view_as(asked)
    # Sums are padded, as what is left over behind whole registers is rounded otherwise, and added up in order.
    flat = sums.flatten(1)
    shares = functional.pad(flat, (0, -flat.shape[1] % _LANES)).softmax(0)[:, : flat.shape[1]].view_as(sums)[..., None]
    total = found[0] * shares[0]
    for part, share in zip(found[1:], shares[1:], strict=True):
        total += part * share
    return total.to(asked.dtype).view_as(asked)


def _call(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What queries [n, G, 4 g, D] get of keys [n, G, 256, D], and the logarithms of their sums [n, G, 4 g]."""
    return torch._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, False, attn_mask=mask[:, None])
