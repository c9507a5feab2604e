"""The protocols of a model's forward and of faster parts of a draft model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from forerun.engine.target import Capture
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache
from forerun.sampling.sampler import ChainSampling, Drafted


class Forward(Protocol):
    """Run the new tokens of some rows of a cache, laid out as it needs them.

    Attributes:
        dtype: of hidden states, keys and values.
        exact: "bitwise" if a token's logits are the same bits whatever is run with it, else "rounding".
    """

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def exact(self) -> Literal["bitwise", "rounding"]: ...

    def __call__(
        self, inputs: Inputs, cache: KVCache, logits: bool, capture: Capture
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return logits [n, V], if wanted, and captured hidden states [n, d], in the order of `inputs`."""


class DraftHead(Protocol):
    """An LM head for hot tokens [S] and those of each sequence's text (`forerun.backends.hot`)."""

    @property
    def tokens(self) -> Tensor: ...
    def fresh(self) -> Self: ...
    def add_context_tokens(self, id: int, tokens: Iterable[int]) -> None: ...
    def drop(self, id: int) -> None: ...
    def reset(self) -> None: ...

    def __call__(self, states: Sequence[Tensor], ids: Sequence[int]) -> Tensor:
        """Return logits [n, V] of the states [N_r, d] of these sequences."""


class FusedDraft(Protocol):
    """A fused draft: a whole chain in one call (`forerun.backends.chain`).

    Run the `pending` tokens of a sequence, then draft up to `most` tokens, by argmax or by `sampling`. The draft ends
    with a token that is less probable than `least`, that brings the product of all probabilities below `product`, or
    that is one of `ends`; and before logits that are not numbers. All tokens but the last are run and committed.

    Attributes:
        hot: the draft's LM head for hot tokens; None for the model's own.
    """

    @property
    def hot(self) -> DraftHead | None: ...
    def fresh(self) -> Self: ...

    def __call__(
        self,
        cache: KVCache,
        id: int,
        pending: Sequence[int],
        most: int,
        least: float,
        product: float,
        ends: Collection[int],
        sampling: ChainSampling | None,
    ) -> Drafted: ...
