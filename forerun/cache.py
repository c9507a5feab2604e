"""A preallocated KV cache with rows of their own lengths, handed to Hugging Face models in place of theirs."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK = 256  # positions a buffer grows by


class KVCache(Cache):
    """Keys and values of `rows` sequences, `lengths[r]` committed positions each.

    A forward of N new tokens a row writes them behind the committed ones, provisionally; `commit` keeps a path of
    them, and what is not committed is overwritten by the next forward. Nothing is ever dropped for a sliding
    window: masks do that, so a rollback is a smaller number.
    """

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(self, layers: int, rows: int, sliding: list[bool] | None = None) -> None:
        self.lengths = [0] * rows
        self._slots: Tensor | None = None
        self._longest = 0
        sliding = sliding or [False] * layers
        super().__init__(layers=[KVLayer(self, is_sliding) for is_sliding in sliding])

    @property
    def uniform(self) -> bool:
        """All rows have the same number of committed positions."""
        return min(self.lengths) == max(self.lengths)

    def begin(self, device: torch.device, new: int) -> None:
        """Called before a forward of `new` tokens a row: says where they go."""
        self._slots, self._longest = None, max(self.lengths)
        if not self.uniform:
            self._slots = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(new, device=device)

    def commit(self, paths: list[list[int]]) -> None:
        """Keeps the provisional entries `paths[r]` of each row, in that order, behind its committed ones."""
        for row, path in enumerate(paths):
            start = self.lengths[row]
            if path != list(range(len(path))):
                for layer in self.layers:
                    layer.gather(row, start, path)
            self.lengths[row] = start + len(path)

    def crop_to(self, lengths: list[int]) -> None:
        """Forgets the positions from `lengths[r]` on in each row."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)

    def keep(self, rows: list[int]) -> None:
        """Drops all rows but `rows`, which take their places in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.keep(rows)


class KVLayer(CacheLayerMixin):
    """One layer's keys and values [B, H, capacity, D]; the cache it belongs to knows the lengths."""

    is_croppable = False  # not through transformers: rows have lengths of their own
    keys: Tensor
    values: Tensor

    def __init__(self, cache: KVCache, is_sliding: bool) -> None:
        super().__init__()
        self.cache = cache
        self.is_sliding = is_sliding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, heads, _, _ = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, 0, key_states.shape[-1])
        self.values = value_states.new_zeros(rows, heads, 0, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes [B, H, N, D] behind the committed positions; returns views [B, H, longest + N, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, new = self.cache, key_states.shape[-2]
        start = cache._longest
        end = start + new
        if end > self.keys.shape[-2]:
            self._grow(end)
        if cache._slots is None:
            self.keys[:, :, start:end] = key_states
            self.values[:, :, start:end] = value_states
        else:
            rows = torch.arange(len(key_states), device=key_states.device)[:, None]
            self.keys[rows, :, cache._slots] = key_states.transpose(1, 2)
            self.values[rows, :, cache._slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grow(self, needed: int) -> None:
        capacity = -(-needed // BLOCK) * BLOCK
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[-1])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def gather(self, row: int, start: int, path: list[int]) -> None:
        if not self.is_initialized:  # layers that share another's entries have none
            return
        index = start + torch.tensor(path, device=self.keys.device)
        self.keys[row, :, start : start + len(path)] = self.keys[row, :, index]
        self.values[row, :, start : start + len(path)] = self.values[row, :, index]

    def keep(self, rows: list[int]) -> None:
        if not self.is_initialized:
            return
        moved = [(place, row) for place, row in enumerate(rows) if place != row]
        if any(row < len(rows) for _, row in moved):
            self.keys, self.values = self.keys[rows], self.values[rows]
            return
        # Rows from behind take the places of others: nothing else is copied.
        for place, row in moved:
            length = self.cache.lengths[place]
            self.keys[place, :, :length] = self.keys[row, :, :length]
            self.values[place, :, :length] = self.values[row, :, :length]
        self.keys, self.values = self.keys[: len(rows)], self.values[: len(rows)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.cache.lengths) + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.cache.lengths)

    def get_max_length(self) -> int:
        return -1
