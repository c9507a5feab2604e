"""Decoder layers in one call of C (`layers.c`): those of a model, and those of a head over hidden states."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.backends.native import LANES, TokenBatch
from forerun.backends.tiles import BatchArgument, LayerArgument, Room, TileArgument, Tiles, room
from forerun.model.kv_cache import KVCache, KVLayer

_NOTHING = TileArgument()


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer.

    Attributes:
        first, second: gains [d] of its norms, which hold the root of d.
        bias: [(H + 2 G) D] of queries, keys and values.
        each: [H + G, D] gains of the norms of queries and keys.
        window: how far a token sees back, 0 for everything.
    """

    first: Tensor
    qkv: Tiles
    out: Tiles
    second: Tensor
    up: Tiles
    down: Tiles
    bias: Tensor | None = None
    each: Tensor | None = None
    rotates: bool = True
    window: int = 0


class NativeLayers:
    """Decoder layers and the norm behind them. Each entry has the same bits whatever entries are run beside it."""

    def __init__(
        self,
        library: Any,
        layers: Sequence[LayerWeights],
        last: Tensor,
        heads: int,
        groups: int,
        size: int,
        eps: float,
    ) -> None:
        """`last`: the gain of the norm behind them. `size`: of a head."""
        self.library, self._kept = library, (layers, last)  # C knows addresses alone
        self.first = layers[0].first
        self.heads, self.groups, self.size = heads, groups, size
        self.width, self.inner = layers[0].down.out, layers[0].down.inputs
        self.floors = self.width * eps, size * eps
        followers = [*(layer.first for layer in layers[1:]), last]
        self.arguments = (LayerArgument * len(layers))()
        for at, layer, gain in zip(self.arguments, layers, followers, strict=True):
            at.qkv, at.out, at.up, at.down = (
                product.argument for product in (layer.qkv, layer.out, layer.up, layer.down)
            )
            at.second, at.next, at.rotates = layer.second.data_ptr(), gain.data_ptr(), layer.rotates
            at.bias, at.gains = (None if part is None else part.data_ptr() for part in (layer.bias, layer.each))
            at.window = layer.window

    def __call__(
        self,
        given: Tensor,
        batch: TokenBatch,
        turn: tuple[Tensor, Tensor],
        cache: KVCache,
        below: bool = False,
        fuse: Tiles | None = None,
        between: Tiles | None = None,
        steps: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """States behind the last norm, float32 [steps n, d], and bfloat16 [n, d]: the last step's, or those `below` the
        last layer. Keys and values go into the cache.

        Args:
            given: float32 [n, d], which is overwritten; or what `fuse` makes that of.
            turn: cosines and sines [steps n, D], of which the sines of the first half are negative.
            between: each step after the first runs what the one before gave, or its product with this.
            steps: for more than one, slots and places are [steps n] too.
        """
        count, threads = len(batch.row), torch.get_num_threads()
        entry = given.bfloat16().contiguous() if fuse is not None else None
        x = given if fuse is None else room(count, self.width)
        assert x.is_contiguous() and x.dtype == torch.float32
        layers = type(self.arguments).from_buffer_copy(self.arguments)  # others may run on other caches meanwhile
        point_at(layers, cache, self.groups, self.size)
        attended, parts = self.heads * self.size, (self.heads + 2 * self.groups) * self.size
        outs = self.width, parts, attended, 2 * self.inner, self.inner
        h, *others = (room(count, size, dtype=torch.bfloat16) for size in outs)
        places, space = places_and_space(batch.end, self.heads, self.groups, self.size)
        scratch, whole = room(threads, space), room(steps * count, self.width)
        lower = room(count, self.width) if below else None
        inputs = Room(count, max(self.width, attended, self.inner, 0 if fuse is None else fuse.inputs))
        argument = BatchArgument(
            *(len(layers), count, self.width, self.inner, self.heads, self.groups, self.size),
            *(batch.paths.shape[1], places, space, threads, steps, count, steps * count, batch.paths.numel()),
            *(part.data_ptr() for part in (self.first, *turn)),
            *(part.data_ptr() for part in (batch.row, batch.length, batch.slot, batch.place, batch.paths)),
            *(part.data_ptr() for part in (x, whole)),
            None if lower is None else lower.data_ptr(),
            *(part.data_ptr() for part in (scratch, h, *others)),
            None if entry is None else entry.data_ptr(),
            *(_NOTHING if product is None else product.argument for product in (fuse, between)),
            *(inputs.argument, *self.floors),
        )
        self.library.run_layers(ctypes.byref(layers), ctypes.byref(argument))
        return whole, h if lower is None else lower.bfloat16()


class OwnBatch:
    """A batch with memory of its own, for calls of C that fill it in. Its places are its slots.

    Attributes:
        argument, each: of these calls: the batch and its layers.
    """

    def __init__(self, layers: NativeLayers, most: int, slots: int, paths: int) -> None:
        """`most`: tokens at once. `slots`, `paths`: numbers of these."""
        self._layers, d, attended = layers, layers.width, layers.heads * layers.size
        widths = d, attended + 2 * layers.groups * layers.size, attended, 2 * layers.inner, layers.inner
        halves = [room(most, width, dtype=torch.bfloat16) for width in widths]
        numbers = [room(count, dtype=torch.int32) for count in (most, most, slots, paths)]
        x, whole = room(most, d), room(most, d)
        inputs = Room(most, max(2 * d, attended, layers.inner))
        self.each = type(layers.arguments).from_buffer_copy(layers.arguments)
        self.argument = BatchArgument(
            layers=len(self.each),
            n=1,
            d=d,
            inner=layers.inner,
            heads=layers.heads,
            groups=layers.groups,
            size=layers.size,
            path=1,
            steps=1,
            most=most,
            slots=slots,
            routes=paths,
            first=layers.first.data_ptr(),
            x=x.data_ptr(),
            whole=whole.data_ptr(),
            fuse=_NOTHING,
            between=_NOTHING,
            room=inputs.argument,
            floor=layers.floors[0],
            floor_each=layers.floors[1],
            **dict(zip(("row", "length", "slot", "paths"), (part.data_ptr() for part in numbers), strict=True)),
            **dict(
                zip(("h", "parts", "attended", "both", "inside"), (part.data_ptr() for part in halves), strict=True)
            ),
        )
        self.argument.place = self.argument.slot
        self._kept: Any = x, whole, halves, numbers, inputs  # C knows addresses alone
        self._capacity = 0

    def point_at(self, cache: KVCache) -> None:
        """Has the batch run in this cache, with torch's threads."""
        layers, batch, threads = self._layers, self.argument, torch.get_num_threads()
        point_at(self.each, cache, layers.groups, layers.size)
        if cache.capacity != self._capacity or threads > batch.threads:
            width, space = places_and_space(cache.capacity, layers.heads, layers.groups, layers.size)
            scratch = room(threads, space)  # may fail: nothing has changed so far
            self._scratch, self._capacity = scratch, cache.capacity
            batch.width, batch.space, batch.scratch = width, space, scratch.data_ptr()
        batch.threads = threads


def point_at(arguments: Any, cache: KVCache, groups: int, size: int) -> None:
    """Tells layers where their keys and values are."""
    for at, stored in zip(arguments, cache.layers, strict=True):
        both = buffers(stored, groups, size)
        at.cache, at.rows, at.capacity = both.data_ptr(), both.shape[0], both.shape[2]


def buffers(stored: KVLayer, groups: int, size: int) -> Tensor:
    """Keys and values [rows, 2 G, capacity, D] of a layer of a cache, allocated where they are not yet."""
    if not stored.is_initialized:
        states = room(1, groups, 1, size, dtype=torch.bfloat16)
        stored.lazy_initialization(states, states)
    assert stored.both is not None
    return stored.both


def places_and_space(end: int, heads: int, groups: int, size: int) -> tuple[int, int]:
    """How many scores attention to `end` places takes, and how many numbers of scratch (`attend` in between.c)."""
    places, shared = -(-end // LANES) * LANES, heads // groups
    return places, max(groups * size, shared * (size + places))
