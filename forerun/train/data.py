"""Token streams and the batches cut from them; a batch is a function of its step, so resuming is exact."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


class Windows:
    """Windows of `length + 1` tokens over a flat token stream, in a new order and phase every epoch.

    `batch(step, size)` is the same whenever it is asked for: no iterator state to save.
    """

    def __init__(self, stream: np.ndarray, length: int, seed: int = 0) -> None:
        if len(stream) < 2 * length + 2:
            raise ValueError(
                f"the data holds {len(stream)} tokens, too few for windows of {length}: "
                f"give at least {2 * length + 2} tokens or a smaller length"
            )
        self.stream, self.length, self.seed = stream, length, seed
        self.per_epoch = (len(stream) - length - 1) // length
        self._order = lru_cache(maxsize=2)(self._new_order)

    def _new_order(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        return rng.permutation(self.per_epoch) * self.length + rng.integers(self.length)

    def batch(self, step: int, size: int) -> Tensor:
        """Tokens [size, length + 1] of the given step."""
        starts = [self._order(i // self.per_epoch)[i % self.per_epoch] for i in range(step * size, (step + 1) * size)]
        rows = np.stack([self.stream[start : start + self.length + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))
