"""A draft of one sequence in one call of C: `draft_chain` in `layers.c`.

A small model is done with a token in a fraction of a millisecond. Python and torch between two tokens take longer than
that, more so behind a target's forward, which leaves none of their code in the processor's caches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.backends.native_family import NativeForward
from forerun.backends.native_layers import OwnBatch
from forerun.backends.scores import Scores
from forerun.backends.stored import StoredEmbedding
from forerun.backends.tiles import (
    LANES,
    ChainArgument,
    Halves,
    room,
)
from forerun.model.forward import Forward
from forerun.model.kv_cache import KVCache
from forerun.sampling.sampler import Drafted, Drawing

if TYPE_CHECKING:
    from forerun.backends.hot import HotHead

PENDING = 8  # tokens that the model may have to catch up with
LONGEST = 256  # tokens of a draft
ENDS = 16  # end tokens


class NativeChain:
    """Drafts what `CausalLM.roll` does, up to rounding, or samples from its logits, and decides after each token
    whether another one comes."""

    def __init__(self, forward: NativeForward, head: Scores, table: Tensor, hot: HotHead | None) -> None:
        """`table` [V, d] bfloat16: the embeddings."""
        assert forward.whole is not None and table.dtype == torch.bfloat16 and table.is_contiguous()
        self._made = forward, head, table
        self._layers, self._forward, self.hot = forward.whole, forward, hot
        d, n = self._layers.width, PENDING
        self._batch = OwnBatch(self._layers, n, n, n * n)
        states = Halves(1, d)
        rest, more = (table, 0) if hot is None else (hot.weight, hot.most)
        assert rest.dtype == torch.bfloat16 and rest.is_contiguous()
        logits, places = room(-(-(head.out + more) // LANES) * LANES), None
        if hot is not None:
            places = torch.full((len(table),), -1, dtype=torch.int32)
            places[hot.tokens] = torch.arange(len(hot.tokens), dtype=torch.int32)
        self._pending: Any = (ctypes.c_int64 * n)()
        self._met: Any = (ctypes.c_int64 * more)()
        self._ends: Any = (ctypes.c_int64 * ENDS)()
        self._drafted = (ctypes.c_int64 * LONGEST)()
        self._chances: Any = (ctypes.c_float * LONGEST)()
        self._keys: Any = (ctypes.c_uint64 * LONGEST)()
        self._head = head.argument
        self._chain = ChainArgument(
            table=table.data_ptr(),
            rest=rest.data_ptr(),
            names=None if hot is None else hot.tokens.data_ptr(),
            places=None if places is None else places.data_ptr(),
            size=len(table),
            met=ctypes.addressof(self._met),
            pending=ctypes.addressof(self._pending),
            ends=ctypes.addressof(self._ends),
            logits=logits.data_ptr(),
            chances=ctypes.addressof(self._chances),
            drafted=ctypes.addressof(self._drafted),
            halves=states.argument,
            longest=LONGEST,
        )
        # C knows addresses alone.
        self._kept: Any = head, table, rest, states, logits, places

    def fresh(self) -> NativeChain:
        """The same for another cache, with buffers of its own."""
        return NativeChain(*self._made, self.hot.fresh() if self.hot is not None else None)

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
    ) -> Drafted | None:
        """`CausalLM.chain`."""
        if len(pending) > PENDING or len(ends) > ENDS or most > LONGEST:
            return None
        row, chain = cache.row(id), self._chain
        length = cache.lengths[row]
        cache.reserve(row + 1, length + len(pending) + most - 1)  # the last token is not run
        self._batch.point_at(cache)
        if cache.capacity > chain.positions:
            self._turn = self._forward.rotations(cache.capacity)
            chain.cos, chain.sin = (each.data_ptr() for each in self._turn)
            chain.positions = len(self._turn[0])
        chain.known = 0
        if self.hot is not None:
            self.hot.add_context_tokens(id, pending)
            met = self.hot.context_tokens(id)
            chain.known = len(met)
            self._met[: len(met)] = met
        self._pending[: len(pending)] = list(pending)
        self._ends[: len(ends)] = list(ends)
        chain.at, chain.length, chain.count, chain.most, chain.ended = row, length, len(pending), most, len(ends)
        chain.least, chain.product = least, product
        laws = self._draw(drawing, most)
        count = self._layers.library.draft_chain(
            ctypes.byref(self._batch.each),
            ctypes.byref(self._batch.argument),
            ctypes.byref(self._head),
            ctypes.byref(chain),
        )
        cache.lengths[row] = length + len(pending) + count - 1
        whole = None if drawing is None or drawing.numbers is None else self._whole_laws(laws[:count])
        return Drafted(self._drafted[:count], whole, self._chances[:count])

    def _draw(self, drawing: Drawing | None, most: int) -> Tensor:
        """Says how tokens are sampled; where their distributions will be, [most, logits] of which the last ones are of
        no token. Of races, one row for all."""
        chain = self._chain
        padded = -(-(self._head.out + chain.known) // LANES) * LANES
        chain.laws, chain.numbers, chain.keys = None, None, None
        if drawing is None:
            return torch.empty(0, padded)
        laws = torch.empty(most if drawing.numbers is not None else 1, padded)
        chain.laws, chain.turn, chain.top_p = laws.data_ptr(), 1 / drawing.law.temperature, drawing.law.top_p
        if drawing.numbers is not None:
            assert drawing.numbers.dtype == torch.float64 and len(drawing.numbers) >= most
            chain.numbers = drawing.numbers.data_ptr()
        else:
            self._keys[:most] = drawing.keys[:most]
            chain.keys, chain.among = ctypes.addressof(self._keys), drawing.size or chain.size
        return laws

    def _whole_laws(self, laws: Tensor) -> Tensor:
        """Distributions [n, V] from those of the head's tokens and of the text's."""
        if self.hot is None:
            return laws[:, : self._head.out]
        met = list(self._met[: self._chain.known])
        whole = torch.zeros(len(laws), self.hot.vocab_size)
        whole[:, self.hot.tokens] = laws[:, : self._head.out]
        whole[:, met] = laws[:, self._head.out : self._head.out + len(met)]
        return whole


def native_chain(forward: Forward, hot: HotHead | None) -> NativeChain | None:
    """None for what C cannot draft with: weights that are not stored in few bits, and models of another form."""
    if not isinstance(forward, NativeForward) or forward.whole is None:
        return None
    head = forward.head if hot is None else hot.product
    table = forward.embed.stored if type(forward.embed) is StoredEmbedding else None
    if not isinstance(head, Scores) or head.tiles is None or not isinstance(table, Tensor):
        return None
    return NativeChain(forward, head, table, hot)
