"""The common base of models and of heads over hidden states: sequences in the rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache


class Rows:
    """Sequences in a cache, one a row, by their ids."""

    device: torch.device  # of the model
    dtype: torch.dtype  # of hidden states, keys and values
    cache: KVCache

    def __contains__(self, id: object) -> bool:
        return id in self.cache

    def length(self, id: int) -> int:
        """Return the number of a sequence's committed positions; 0 without a row."""
        return self.cache.length(id)

    @torch.inference_mode()
    def add(self, id: int, reserve: int = 0) -> None:
        """Add an empty row for a sequence of at most `reserve` positions."""
        self.cache.add(id, reserve)

    @torch.inference_mode()
    def drop(self, id: int) -> None:
        """Forget a sequence, if it has a row."""
        self.cache.drop(id)

    def commit(self, ids: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep the keys and values on a path of each sequence's last draft."""
        self.cache.commit(ids, paths)

    def crop(self, ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Shorten each sequence to its first `lengths[r]` positions."""
        self.cache.crop_to(ids, lengths)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget all sequences. Buffers stay."""
        self.cache.reset()

    def _inputs(
        self,
        ids: Sequence[int],
        depths: Sequence[Sequence[int]],
        masks: Sequence[Tensor] | None = None,
        tokens: Sequence[Sequence[int]] | None = None,
        given: Tensor | None = None,
    ) -> Inputs:
        """Return new entries of these sequences."""
        return Inputs([self.cache.row(id) for id in ids], depths, masks, tokens, given)
