"""Fused drafts: a whole draft of one sequence in one call of the C library (`fr_chain`).

A small model takes a fraction of a millisecond a token. Python and torch between two tokens take longer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.backends.panels import Panels
from forerun.backends.quantised import Part, QuantisedForward
from forerun.csrc.library import ChainArgument
from forerun.model.forward import Forward
from forerun.model.kv_cache import KVCache
from forerun.sampling.sampler import ChainSampling, Drafted
from forerun.sampling.threads import one_thread

if TYPE_CHECKING:
    from forerun.backends.hot import HotHead


class FusedChain:
    """Draft a chain in C (`forerun.model.forward.FusedDraft`), with a draft model and its hot head if it has one."""

    def __init__(self, forward: QuantisedForward, hot: HotHead | None) -> None:
        self._forward, self.hot = forward, hot
        self._head: Panels = forward.head
        self._names = self._places = None
        if hot is not None:
            assert isinstance(hot.product, Panels)
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
        most: int,
        least: float,
        product: float,
        ends: Collection[int],
        sampling: ChainSampling | None,
    ) -> Drafted:
        layers, row = self._forward.layers, cache.row(id)
        length = cache.lengths[row]
        cache.reserve(row + 1, length + len(pending) + most - 1)  # the last token is not run
        extra: list[int] = []
        if self.hot is not None:
            self.hot.add_context_tokens(id, pending)
            extra = self.hot.context_tokens(id)
        size = self._head.out + len(extra)
        drafted, probabilities = np.empty(most, np.int32), np.empty(most, np.float32)
        chain = ChainArgument(
            row=row,
            length=length,
            count=len(pending),
            most=most,
            extras=len(extra),
            ended=len(ends),
            turn=1,
            top_p=1,
        )
        chain.least, chain.product = least, product
        parts: dict[str, Part] = {}
        probs: Tensor | None = None
        if sampling is not None:
            chain.turn, chain.top_p = (
                1 / sampling.distribution.temperature,
                sampling.distribution.top_p,
            )
            probs = torch.empty(most if sampling.numbers is not None else 1, size)
            if sampling.numbers is not None:
                parts["numbers"] = np.ascontiguousarray(sampling.numbers.numpy(), np.float64)
            else:
                parts["keys"] = np.asarray(sampling.keys[:most], np.uint64)
                chain.among = sampling.size or self._forward.head.out
        count = layers.run(
            "fr_chain",
            cache,
            chain,
            pending=np.asarray(pending, np.int32),
            head=self._head.argument if self.hot is not None else None,
            names=self._names,
            places=self._places,
            extra=np.asarray(extra, np.int32),
            ends=np.asarray(list(ends), np.int32),
            probs=probs,
            drafted=drafted,
            probabilities=probabilities,
            **parts,
        )
        cache.lengths[row] = length + len(pending) + max(count, 1) - 1
        whole = None
        if probs is not None and sampling is not None and sampling.numbers is not None:
            whole = self._whole(probs[:count], extra)
        return Drafted(drafted[:count].tolist(), whole, probabilities[:count].tolist())

    def _whole(self, probs: Tensor, extra: Sequence[int]) -> Tensor:
        """Return distributions [n, V] from those [n, S + e] over the head's S tokens and the text's e extra ones."""
        if self.hot is None:
            return probs
        with one_thread(len(probs) * self.hot.vocab_size):
            whole = torch.zeros(len(probs), self.hot.vocab_size)
            whole[:, self.hot.tokens] = probs[:, : self._head.out]
            whole[:, list(extra)] = probs[:, self._head.out :]
        return whole


def fused_chain(forward: Forward, hot: HotHead | None) -> FusedChain | None:
    """Return fused drafts for a forward in C with a hot head in C or none, else None."""
    if not isinstance(forward, QuantisedForward) or (
        hot is not None and not isinstance(hot.product, Panels)
    ):
        return None
    return FusedChain(forward, hot)
