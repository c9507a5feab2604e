"""Forwards of a few tokens at fixed shapes, recorded as CUDA graphs and replayed: no operation is started from Python.
A shape is recorded when it first comes, which takes some forwards' time.

Shapes come in buckets: rows, tokens a row, and how much of the cache is looked at. Everything that differs between two
forwards of one bucket goes in through small buffers; masks are made inside the graph. On a CPU, where nothing can be
recorded, the same forward runs as it is, for tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.cache import KVCache
from forerun.model import Ids, LeanForward

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
STEP = 256  # by which what is looked at grows


class Recorded:
    """A lean forward whose keys and values stay in one place, so that graphs can be recorded over them.

    The cache of whoever called last lives in that place; another's is moved out as it comes.
    """

    def __init__(self, forward: LeanForward) -> None:
        self.forward = forward
        self.rows = self.capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.shapes: dict[tuple[int, int, int, bool], Shape] = {}
        self.owner: weakref.ref[KVCache] | None = None
        self.pool: Any = None  # what graphs use between replays, which is the same, as what they say is copied

    def __call__(
        self,
        tokens: Ids,
        depths: Sequence[Sequence[int]],
        masks: Sequence[Tensor] | None,
        cache: KVCache,
        wanted: bool,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Logits [B, N, V] of rows of new tokens as `CausalLM` has them, or a head's next states [B, 1, d]; and the LM
        head's input [B, N, d] where that is wanted. None for more tokens than the widest shape has, and behind nothing,
        where the cache has no layers yet."""
        new, rows = max(map(len, depths)), len(depths)
        if new > WIDTHS[-1] or not max(cache.lengths):
            return None
        width = next(width for width in WIDTHS if width >= new)
        seen = -(-(max(cache.lengths) + width) // STEP) * STEP
        self._move_in(cache, seen)
        key = rows, width, seen, wanted
        if key not in self.shapes:
            layers = [StaticLayer(keys[:rows, :, :seen], values[:rows, :, :seen]) for keys, values in self._places()]
            if self.keys[0].device.type == "cuda" and self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            like = tokens if isinstance(tokens, Tensor) and tokens.is_floating_point() else None
            self.shapes[key] = Shape(self.forward, layers, width, wanted, self.pool, like)
        logits, hidden = self.shapes[key](tokens, depths, masks, cache.lengths)
        # Copies: the next replay writes where these are.
        return logits[:, :new].clone(), hidden[:, :new].clone() if hidden is not None else None

    def _places(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.keys, self.values, strict=True))

    def _move_in(self, cache: KVCache, seen: int) -> None:
        """Has the cache's layers live in our buffers."""
        rows = len(cache.lengths)
        owner = self.owner() if self.owner is not None else None
        if owner is not None and owner is not cache:
            for layer in owner.layers:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        longest = max(max(cache.lengths), 1)
        if rows > self.rows or seen > self.capacity:
            self.shapes.clear()
            if seen > self.capacity:
                self.capacity = max(seen, 2 * self.capacity)  # recording anew takes time
            self.rows = max(rows, self.rows)
            like = [(layer.keys, layer.values) for layer in cache.layers]
            self.keys, self.values = (
                [old[i].new_zeros(self.rows, old[i].shape[1], self.capacity, old[i].shape[3]) for old in like]
                for i in (0, 1)
            )
        for layer, (keys, values) in zip(cache.layers, self._places(), strict=True):
            if layer.keys.data_ptr() != keys.data_ptr() or len(layer.keys) != rows:
                keys[:rows, :, :longest] = layer.keys[:, :, :longest]
                values[:rows, :, :longest] = layer.values[:, :, :longest]
                layer.keys, layer.values = keys[:rows], values[:rows]
        self.owner = weakref.ref(cache)


class StaticLayer:
    """Keys and values [B, G, P, D] that a graph writes to and reads whole. Where, the mask knows too."""

    slots: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.row = torch.arange(len(keys), device=keys.device)[:, None]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[self.row, :, self.slots] = keys.transpose(1, 2)
        self.values[self.row, :, self.slots] = values.transpose(1, 2)
        return self.keys, self.values


class Shape:
    """The forward of one shape, of tokens or of states [B, 1, d]."""

    def __init__(
        self,
        forward: LeanForward,
        layers: list[StaticLayer],
        width: int,
        wanted: bool,
        pool: Any,
        states: Tensor | None,
    ) -> None:
        first = layers[0].keys
        self.forward, self.layers, self.width, self.wanted = forward, layers, width, wanted
        self.seen, self.dtype, device = first.shape[2], first.dtype, first.device
        # Of each row its length, tokens, positions, and which of its new tokens see which.
        self.given = torch.zeros(len(first), 1 + 2 * width + width**2, dtype=torch.long, device=device)
        self.states = states.clone() if states is not None else None
        self.causal = torch.ones(width, width, dtype=torch.long).tril()
        self.graph: Any = None
        # What is made at the first call must not be made in the graph. These runs write where nothing is kept.
        self.given[:, 0] = self.seen - width
        if device.type != "cuda":
            self._run()
            return
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._run()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool):
                self.found = self._run()

    def _run(self) -> tuple[Tensor, Tensor | None]:
        rows, width = len(self.given), self.width
        lengths, ids, positions, inner = self.given.split([1, width, width, width**2], -1)
        slots = lengths + torch.arange(width, device=lengths.device)
        seen = (torch.arange(self.seen, device=lengths.device) < lengths)[:, None].repeat(1, width, 1)
        seen.scatter_(2, slots[:, None].expand(-1, width, -1), inner.view(rows, width, width).bool())
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        mask = mask.masked_fill(~seen, torch.finfo(self.dtype).min)[:, None]
        cache: Any = self
        for layer in self.layers:
            layer.slots = slots
        return self.forward(ids if self.states is None else self.states, positions, cache, mask, False, self.wanted)

    def __call__(
        self, tokens: Ids, depths: Sequence[Sequence[int]], masks: Sequence[Tensor] | None, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        width, there = self.width, isinstance(tokens, Tensor)
        # New at every call, as the last one may still be on its way; torch keeps pinned memory for when it has come.
        facts = torch.zeros(self.given.shape, dtype=torch.long, pin_memory=self.graph is not None)
        for row, (places, length) in enumerate(zip(depths, lengths, strict=True)):
            rest = width - len(places)
            ids = [0] * len(places) if there else tokens[row]
            inner = self.causal
            if masks is not None:
                inner = torch.eye(width, dtype=torch.long)
                inner[: len(places), : len(places)] = masks[row]
            # Padding takes a position that has been there.
            begun = [length, *ids, *[0] * rest, *(length + place for place in places), *[max(length - 1, 0)] * rest]
            facts[row, : 1 + 2 * width] = torch.tensor(begun)
            facts[row, 1 + 2 * width :] = inner.flatten()
        self.given.copy_(facts, non_blocking=True)
        if self.states is not None:
            self.states.copy_(tokens)  # type: ignore[arg-type]
        elif isinstance(tokens, Tensor):
            self.given[:, 1 : 1 + tokens.shape[1]] = tokens
        if self.graph is None:
            return self._run()
        with torch.cuda.device(self.given.device):
            self.graph.replay()
        return self.found
