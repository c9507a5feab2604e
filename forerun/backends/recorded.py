"""Forwards of a few tokens at fixed shapes, recorded as CUDA graphs and replayed: no operation is started from Python.
A shape is recorded when it first comes, which takes some forwards' time.

Shapes come in buckets: rows, tokens a row, and how much of the cache is looked at. Everything that differs between two
forwards of one bucket goes in through small buffers; masks are made inside the graph. On a CPU, where nothing can be
recorded, the same forward runs as it is, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.model.batch import ForwardBatch, Inputs, facts, insides, places_and_mask
from forerun.model.kv_cache import KVCache
from forerun.model.rows import LeanForward

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
STEP = 256  # by which what is looked at grows


class Recorded:
    """A lean forward over one cache's buffers. Graphs are recorded anew when these move."""

    def __init__(self, forward: LeanForward) -> None:
        self.forward = forward
        self.shapes: dict[tuple[int, int, int, str], FixedShape] = {}
        self.version = -1  # of the cache that the shapes were made for
        self.pool: Any = None  # memory of all graphs; they can share it, as their outputs are copied

    def fresh(self) -> Recorded:
        """The same forward, for another cache."""
        return Recorded(self.forward)

    def __call__(self, inputs: Inputs, cache: KVCache, wanted: str) -> tuple[Tensor, Tensor | None] | None:
        """Logits [B, N, V] of new tokens, or a head's next states [B, 1, d]; and the states [B, N, d] that are wanted
        (`forerun.model.rows.LeanForward`). None for more tokens than the widest shape has, and before the cache's first
        forward."""
        new, size = inputs.new, inputs.size
        if new > WIDTHS[-1] or not cache.ready:
            return None
        width = next(width for width in WIDTHS if width >= new)
        rows = min(1 << (size - 1).bit_length(), cache.rows_capacity)
        lengths = cache.lengths[:rows] + [0] * (rows - len(cache.ids))
        seen = -(-(max(lengths) + width) // STEP) * STEP
        cache.reserve(rows, seen)
        cache.expect(size, width)  # a graph that is replayed does not say so
        if cache.version != self.version:
            self.shapes.clear()
            self.version = cache.version
        key = rows, width, seen, wanted
        if key not in self.shapes:
            if cache.device.type == "cuda" and self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            states = inputs.given if inputs.given is not None and inputs.given.is_floating_point() else None
            self.shapes[key] = FixedShape(self.forward, cache, rows, width, seen, wanted, self.pool, states)
        found, hidden = self.shapes[key](inputs, lengths)
        # Copies: the next replay writes where these are.
        return found[:size, :new].clone(), hidden[:size, :new].clone() if hidden is not None else None


class FixedShape:
    """The forward of one shape, of tokens or of states [B, 1, d]."""

    def __init__(
        self,
        forward: LeanForward,
        cache: KVCache,
        rows: int,
        width: int,
        seen: int,
        wanted: str,
        pool: Any,
        states: Tensor | None,
    ) -> None:
        self.forward, self.cache, self.wanted = forward, cache, wanted
        self.rows, self.width, self.seen, device = rows, width, seen, cache.device
        # Of each row its length, tokens, positions, and which of its new tokens see which.
        self.given = torch.zeros(rows, 1 + 2 * width + width**2, dtype=torch.long, device=device)
        self.states = states.new_zeros(rows, *states.shape[1:]) if states is not None else None
        self.graph: Any = None
        # What is made at the first call must not be made in the graph. These runs write where nothing is kept.
        self.given[:, 0] = seen - width
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
        rows, width = self.rows, self.width
        lengths, ids, positions, inner = self.given.split([1, width, width, width**2], -1)
        inner = inner.view(rows, width, width).bool()
        slots, mask = places_and_mask(lengths, positions, inner, self.seen, self.cache.dtype)
        self.cache.begin(rows, 0, self.seen, slots)
        tokens = None if self.states is not None else ids
        batch = ForwardBatch(tokens, self.states, positions, 0, self.seen, slots, mask)
        logits, hidden = self.forward(batch, self.cache, True, self.wanted)
        assert logits is not None
        return logits, hidden

    def __call__(self, inputs: Inputs, lengths: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        width = self.width
        # New at every call, as the last one may still be on its way; torch keeps pinned memory for when it has come.
        host = torch.zeros(self.given.shape, dtype=torch.long, pin_memory=self.graph is not None)
        host[:, : 1 + 2 * width] = torch.tensor(facts(inputs, lengths, width))
        host[:, 1 + 2 * width :] = insides(inputs, self.rows, width).flatten(1)
        self.given.copy_(host, non_blocking=True)
        given = inputs.given
        if self.states is not None:
            assert given is not None
            self.states[: len(given)] = given
        elif given is not None:
            self.given[: len(given), 1 : 1 + given.shape[1]] = given
        if self.graph is None:
            return self._run()
        with torch.cuda.device(self.given.device):
            self.graph.replay()
        return self.found
