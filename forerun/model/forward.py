"""The protocols of a model's forward and of faster parts of a draft model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from forerun.engine.target import Capture
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache
from forerun.sampling.sampler import ChainSampling, Drafted


class Forward(Protocol):
    """Run the new tokens of some rows of a cache, in whatever layout the backend needs.

    Attributes:
        dtype: of hidden states, keys and values.
        exact: "bitwise" if the bits of a token's logits do not depend on what else is run, else
            "rounding".
    """

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of hidden states, keys and values."""

    @property
    def exact(self) -> Literal["bitwise", "rounding"]:
        """Return whether the bits of a token's logits depend on what is run with it."""

    def __call__(
        self, inputs: Inputs, cache: KVCache, logits: bool, capture: Capture
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return logits [n, V], if wanted, and captured hidden states [n, d].

        Both are in the order of `inputs`.
        """


class DraftHead(Protocol):
    """An LM head for hot tokens [S] and those of each sequence's text (`forerun.backends.hot`)."""

    @property
    def tokens(self) -> Tensor:
        """Return the hot tokens [S]."""

    def fresh(self) -> Self:
        """Return the same head without any sequence."""

    def add_context_tokens(self, id: int, tokens: Iterable[int]) -> None:
        """Add tokens of a sequence's text, which need logits too."""

    def drop(self, id: int) -> None:
        """Forget a sequence, if it is known."""

    def reset(self) -> None:
        """Forget all sequences."""

    def __call__(self, states: Sequence[Tensor], ids: Sequence[int]) -> Tensor:
        """Return logits [n, V] of the states [N_r, d] of these sequences."""


@dataclass(frozen=True)
class ChainBounds:
    """Where a fused draft ends.

    Attributes:
        max_tokens: the most tokens of the draft.
        min_probability: a token that is less probable is the last one.
        min_product: a token that brings the product of all probabilities below it is the last one.
        ends: each of these tokens is the last one.
    """

    max_tokens: int
    min_probability: float = 0.0
    min_product: float = 0.0
    ends: Collection[int] = ()


class FusedDraft(Protocol):
    """A fused draft: a whole chain in one call (`forerun.backends.chain`).

    Attributes:
        hot: the draft's LM head for hot tokens; None for the model's own.
    """

    @property
    def hot(self) -> DraftHead | None:
        """Return the draft's LM head for hot tokens; None for the model's own."""

    def fresh(self) -> Self:
        """Return the same for another cache."""

    def __call__(
        self,
        cache: KVCache,
        id: int,
        pending: Sequence[int],
        bounds: ChainBounds,
        sampling: ChainSampling | None,
    ) -> Drafted:
        """Run the `pending` tokens of a sequence, then draft within `bounds`.

        Tokens are sampled by `sampling`, or are the argmax without it. The draft ends before
        logits that are not numbers. All tokens but the last are run and committed.
        """
