"""A head's layers in C (`forerun.runtime.native_layers`), with weights in 8 bits. All states that are drafted without
tokens between them are one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache import KVCache
from forerun.nn.heads import HeadLayer, HiddenDrafter
from forerun.runtime.bits import stored
from forerun.runtime.lean import rotations
from forerun.runtime.native import LARGEST_HEAD, TokenBatch, library
from forerun.runtime.native_layers import LayerWeights, NativeLayers
from forerun.runtime.tiles import BLOCK, Tiles, has_tiles

Array = np.ndarray[Any, Any]


class NativeHead:
    """The layers of a lyanna or EAGLE-like head. New entries of sequences stand one behind the other, none of them is
    padding. They are states [n, d], or [n, 2 d] with the tokens behind them."""

    def __init__(self, head: HiddenDrafter, library: Any) -> None:
        config = head.config
        width, root = config.hidden_size, config.hidden_size**0.5
        layers = [
            LayerWeights(
                layer.before_attention.weight.detach().float() * root,
                tiles_of(layer.qkv.weight),
                tiles_of(layer.out.weight),
                layer.before_mlp.weight.detach().float() * root,
                tiles_of(layer.gate_up.weight),
                tiles_of(layer.down.weight),
            )
            for layer in head.layers
            if isinstance(layer, HeadLayer)
        ]
        sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        last = head.norm.weight.detach().float() * root
        self.layers = NativeLayers(library, layers, last, *sizes, config.rms_norm_eps)
        self.width, fuse = width, head.fuse.weight
        self.both = tiles_of(fuse)
        self.alone = tiles_of(fuse[:, :width]) if config.kind == "lyanna" else None
        self.between = self.alone if config.fusion == "every" else None
        first = head.layers[0]
        assert isinstance(first, HeadLayer)
        self.turn = rotations(first.frequencies(torch.device("cpu")), config.max_position_embeddings)

    def extend(self, cache: KVCache, ids: Sequence[int], given: Tensor, counts: Sequence[int]) -> Tensor:
        """Runs and keeps the next entries, `counts[r]` of each sequence; the states [R, d] behind the last ones."""
        rows, lengths = _rows(cache, ids)
        ends = np.cumsum(counts)
        each = np.arange(len(given)) - np.repeat(ends - counts, counts)
        rows, begun = np.repeat(rows, counts), np.repeat(lengths, counts)
        paths = begun[:, None] + np.arange(max(counts))
        fuse = self.both if given.shape[1] > self.width else self.alone
        found = self._run(given, fuse, cache, rows, begun, begun + each, begun + each, paths)
        cache.commit(ids, [range(count) for count in counts])
        return found[-1:] if len(ids) == 1 else found[torch.from_numpy(ends - 1)]

    def roll(self, cache: KVCache, ids: Sequence[int], states: Tensor, steps: int) -> list[Tensor]:
        """Runs and keeps states [R, d], then those that come of them, and so on: the `steps` states [R, d] that
        come."""
        rows, lengths = _rows(cache, ids)
        paths = lengths[:, None] + np.arange(steps)
        places, given = paths.T.ravel(), states if self.between is not None else states.clone()
        found = self._run(given, self.between, cache, rows, lengths, places, places, paths, steps)
        cache.commit(ids, [range(steps)] * len(ids))
        return list(found.view(steps, len(ids), -1))

    def branch(self, cache: KVCache, ids: Sequence[int], given: Tensor, depth: int, seen: Tensor) -> Tensor:
        """`HiddenLM.branch`, of entries [R w, 2 d]; the states [R w, d] behind them."""
        width, back = seen.shape[1], seen.shape[2] - seen.shape[1]
        rows, lengths = (np.repeat(each, width) for each in _rows(cache, ids))
        begun = lengths - back
        # Ancestors stand in the order of their depths, as a parent comes before its children.
        paths = begun[:, None] + np.nonzero(seen.numpy())[2].reshape(-1, depth + 1)
        slots = lengths + np.tile(np.arange(width), len(ids))
        found = self._run(given, self.both, cache, rows, begun, slots, begun + depth, paths)
        cache.commit(ids, [range(width)] * len(ids))
        return found

    def _run(
        self,
        given: Tensor,
        fuse: Tiles | None,
        cache: KVCache,
        rows: Array,
        lengths: Array,
        slots: Array,
        places: Array,
        paths: Array,
        steps: int = 1,
    ) -> Tensor:
        """States [steps n, d]; entries as `TokenBatch` has them."""
        end = int(slots.max()) + 1  # no place is behind its slot
        cache.reserve(int(rows.max()) + 1, end)
        row, length, slot, place, path = (
            torch.from_numpy(np.ascontiguousarray(part, np.int32)) for part in (rows, lengths, slots, places, paths)
        )
        # Beyond its context stands a row that drafts as deep as its neighbours, for nothing.
        positions = place.clamp(max=len(self.turn[0]) - 1)
        batch = TokenBatch(row, positions, row, length, slot, place, path, end)
        cos, sin = (table[positions] for table in self.turn)
        found, _ = self.layers(given, batch, (cos, sin), cache, fuse=fuse, between=self.between, steps=steps)
        return found


def native_head(head: HiddenDrafter) -> NativeHead | None:
    """None where our product cannot be had, and for sizes that C cannot do."""
    config = head.config
    size = config.head_dim
    sizes = config.hidden_size, config.intermediate_size, size
    if not has_tiles() or any(each % BLOCK for each in sizes) or size > LARGEST_HEAD:
        return None
    return NativeHead(head, library())


def tiles_of(weight: Tensor) -> Tiles:
    """A float weight in 8 bits, of sizes that our product can do."""
    found = stored(weight.detach().float().contiguous(), "int8")
    assert isinstance(found, Tiles)
    return found


def _rows(cache: KVCache, ids: Sequence[int]) -> tuple[Array, Array]:
    """Of each sequence its row, and the committed length of that."""
    rows = [cache.row(id) for id in ids]
    return np.array(rows), np.array([cache.lengths[row] for row in rows])
