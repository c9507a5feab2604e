"""What a model of tokens and a head over hidden states have in common: sequences in the rows of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.model.batch import ForwardBatch, Inputs, lay_out
from forerun.model.kv_cache import KVCache

# (a ForwardBatch, or what its own `lay_out` makes; cache; whether logits are wanted; which states are: "head" for the
# LM head's input, "below" for that of the last layer, "" for none) -> logits [B, N, V], those states [B, N, d], or both
# without padding (`Inputs.split`); for a head over hidden states its next states [B, 1, d], None.
LeanForward = Callable[[Any, KVCache, bool, str], tuple[Tensor | None, Tensor | None]]


class Rows:
    """Sequences in a cache, one a row, each known by its id.

    Attributes:
        device, dtype: of the model.
        cache: keys and values.
        window: how far attention sees back, None for everything.
    """

    device: torch.device
    dtype: torch.dtype
    cache: KVCache
    window: int | None = None
    _mask_kinds: list[str] | None = None

    def __contains__(self, id: object) -> bool:
        return id in self.cache

    def length(self, id: int) -> int:
        """Committed positions of a sequence; 0 where it has no row."""
        return self.cache.length(id)

    @torch.inference_mode()
    def add(self, id: int, reserve: int = 0) -> None:
        """An empty row for a sequence, which will need at most `reserve` positions."""
        self.cache.add(id, reserve)

    @torch.inference_mode()
    def drop(self, id: int) -> None:
        """Forgets a sequence; nothing happens where it has no row."""
        self.cache.drop(id)

    @torch.inference_mode()
    def commit(self, ids: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keeps a path of nodes of each sequence's last draft."""
        self.cache.commit(ids, paths)

    def crop(self, ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Shortens each sequence to its first `lengths[r]` positions."""
        self.cache.crop_to(ids, lengths)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forgets all sequences. Buffers stay."""
        self.cache.reset()

    def _inputs(
        self,
        ids: Sequence[int],
        depths: Sequence[Sequence[int]],
        masks: Sequence[Tensor] | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
        given: Tensor | None = None,
    ) -> Inputs:
        """New entries of these sequences, as `forerun.model.batch.Inputs` has them."""
        return Inputs([self.cache.row(id) for id in ids], depths, masks, tokens, given)

    def _lay_out(self, inputs: Inputs, cache: KVCache | None = None) -> ForwardBatch:
        return lay_out(inputs, cache or self.cache, self.device, self.dtype, self.window, self._mask_kinds)
