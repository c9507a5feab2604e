"""Protocols of what runs a model's new tokens, and of what may replace parts of a draft."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from forerun.engine.target import Capture
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache
from forerun.sampling.sampler import Drafted, Drawing


class Forward(Protocol):
    """Runs the new tokens of some rows of a cache. It lays them out as it needs them, with padding if it must.

    Attributes:
        dtype: of hidden states, keys and values.
        exact: "bitwise" if a token's logits have the same bits whatever is run with it, else "rounding".
        pads: whether it runs as many tokens of each row as the longest one has.
    """

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def exact(self) -> Literal["bitwise", "rounding"]: ...
    @property
    def pads(self) -> bool: ...

    def __call__(
        self, inputs: Inputs, cache: KVCache, logits: bool, capture: Capture
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits [n, V] if wanted and captured hidden states [n, d], in the order of `inputs`, without padding."""


class DraftHead(Protocol):
    """Replaces a draft's LM head (`forerun.backends.hot`). It knows each sequence's text, and a few tokens [S]."""

    @property
    def tokens(self) -> Tensor: ...
    def fresh(self) -> Self: ...
    def add_context_tokens(self, id: int, tokens: Iterable[int]) -> None: ...
    def drop(self, id: int) -> None: ...
    def reset(self) -> None: ...

    def __call__(self, states: Sequence[Tensor], ids: Sequence[int]) -> Tensor:
        """Logits [n, V] of the states [N_r, d] of these sequences."""


class FusedDraft(Protocol):
    """Drafts a chain in one call (`forerun.backends.chain`).

    It runs and commits tokens of a sequence, then drafts up to `most`, by argmax or as `drawing` says, and ends sooner
    with one that is less probable than `least`, or makes all together less probable than `product`, or is one of the
    `ends`, or before logits that are not numbers. All but the last one are run and committed.

    Attributes:
        hot: the head that it drafts with; None for the model's own.
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
        drawing: Drawing | None,
    ) -> Drafted: ...
