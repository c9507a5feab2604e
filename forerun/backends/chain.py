"""Fused drafts: a whole draft of one sequence in one call of the C library (`fr_chain`).

A small model takes a fraction of a millisecond per token. The time in Python and torch between two
tokens would be longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.backends.panels import PackedMatrix
from forerun.backends.quantised import Part, QuantisedForward
from forerun.csrc.library import ChainArgument
from forerun.model.forward import ChainBounds, Forward
from forerun.model.kv_cache import KVCache
from forerun.sampling.sampler import ChainSampling, Drafted
from forerun.sampling.threads import one_thread

if TYPE_CHECKING:
    from forerun.backends.hot import HotHead


class FusedChain:
    """Draft a chain in C (`forerun.model.forward.FusedDraft`).

    Attributes:
        hot: the draft's LM head for hot tokens; None for the model's own.
    """

    def __init__(self, forward: QuantisedForward, hot: HotHead | None) -> None:
        """Take a draft model's forward, and its hot head if it has one."""
        self.hot = hot
        self._forward = forward
        self._head = forward.head
        self._names: np.ndarray | None = None  # the hot tokens
        self._places: np.ndarray | None = None  # the index of each token in `_names`, or -1
        if hot is not None:
            assert isinstance(hot.product, PackedMatrix)
            self._head = hot.product
            self._names = hot.tokens.numpy().astype(np.int32)
            self._places = np.full(forward.head.out, -1, np.int32)
            self._places[self._names] = np.arange(len(self._names), dtype=np.int32)

    def fresh(self) -> FusedChain:
        """Return the same for another cache."""
        return FusedChain(self._forward, self.hot.fresh() if self.hot is not None else None)

    def __call__(
        self,
        cache: KVCache,
        id: int,
        pending: Sequence[int],
        bounds: ChainBounds,
        sampling: ChainSampling | None,
    ) -> Drafted:
        """Run `pending` tokens of a sequence and draft within `bounds` (see `FusedDraft`)."""
        max_tokens = bounds.max_tokens
        row = cache.row(id)
        length = cache.lengths[row]
        cache.reserve(row + 1, length + len(pending) + max_tokens - 1)  # the last token is not run
        extra: list[int] = []
        if self.hot is not None:
            self.hot.add_context_tokens(id, pending)
            extra = self.hot.context_tokens(id)
        drafted = np.empty(max_tokens, np.int32)
        probabilities = np.empty(max_tokens, np.float32)
        chain = ChainArgument(
            row=row,
            length=length,
            count=len(pending),
            max_tokens=max_tokens,
            extras=len(extra),
            ended=len(bounds.ends),
            min_probability=bounds.min_probability,
            min_product=bounds.min_product,
            inverse_temperature=1,
            top_p=1,
        )
        parts: dict[str, Part] = {
            "pending": np.asarray(pending, np.int32),
            "head": self._head.argument if self.hot is not None else None,
            "names": self._names,
            "places": self._places,
            "extra": np.asarray(extra, np.int32),
            "ends": np.asarray(list(bounds.ends), np.int32),
            "drafted": drafted,
            "probabilities": probabilities,
        }
        by_numbers: Tensor | None = None  # the distributions that tokens are sampled from
        if sampling is not None:
            is_by_numbers = sampling.numbers is not None
            probs = torch.empty(max_tokens if is_by_numbers else 1, self._head.out + len(extra))
            by_numbers = probs if is_by_numbers else None
            parts["probs"] = probs
            parts |= self._sampling_parts(chain, sampling, max_tokens)
        count = self._forward.layers.run("fr_chain", cache, chain, **parts)
        cache.lengths[row] = length + len(pending) + max(count, 1) - 1
        whole = None if by_numbers is None else self._whole(by_numbers[:count], extra)
        return Drafted(drafted[:count].tolist(), whole, probabilities[:count].tolist())

    def _sampling_parts(
        self, chain: ChainArgument, sampling: ChainSampling, max_tokens: int
    ) -> dict[str, Part]:
        """Set how tokens are sampled; return the parts that they are sampled by."""
        chain.inverse_temperature = 1 / sampling.distribution.temperature
        chain.top_p = sampling.distribution.top_p
        if sampling.numbers is not None:
            return {"numbers": np.ascontiguousarray(sampling.numbers.numpy(), np.float64)}
        chain.sampler_vocabulary = sampling.size or self._forward.head.out
        return {"keys": np.asarray(sampling.keys[:max_tokens], np.uint64)}

    def _whole(self, probs: Tensor, extra: Sequence[int]) -> Tensor:
        """Return distributions [n, V] over the whole vocabulary.

        `probs` [n, S + e] are over the head's S tokens and the text's e extra ones.
        """
        if self.hot is None:
            return probs
        with one_thread(len(probs) * self.hot.vocab_size):
            whole = torch.zeros(len(probs), self.hot.vocab_size)
            whole[:, self.hot.tokens] = probs[:, : self._head.out]
            whole[:, list(extra)] = probs[:, self._head.out :]
        return whole


def fused_chain(forward: Forward, hot: HotHead | None) -> FusedChain | None:
    """Return fused drafts, or None if the forward or the hot head does not run in C."""
    if not isinstance(forward, QuantisedForward):
        return None
    if hot is not None and not isinstance(hot.product, PackedMatrix):
        return None
    return FusedChain(forward, hot)
