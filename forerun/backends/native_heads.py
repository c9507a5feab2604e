"""A head's layers in C (`forerun.backends.native_layers`), with weights in 8 bits. All states that are drafted without
tokens between them are one call, and so is a whole chain for one sequence."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from forerun.backends.bits import Blocks, stored
from forerun.backends.lean import rotations
from forerun.backends.native import LANES, LARGEST_HEAD, TokenBatch, library
from forerun.backends.native_layers import LayerWeights, NativeLayers, OwnBatch
from forerun.backends.scores import Scores
from forerun.backends.stored import StoredEmbedding
from forerun.backends.tiles import (
    BLOCK,
    GuessArgument,
    Halves,
    HeadArgument,
    TileArgument,
    Tiles,
    has_tiles,
    room,
)
from forerun.heads.heads import HeadLayer, HiddenDrafter
from forerun.model.kv_cache import KVCache

if TYPE_CHECKING:
    from forerun.backends.information import NativeInformation

Array = np.ndarray[Any, Any]
LARGEST_TABLE = 2**26  # numbers of embeddings that are copied
PENDING = 32  # features that may wait for a chain
LONGEST = 64  # tokens of one


class NativeHead:
    """The layers of a lyanna or EAGLE-like head. New entries of sequences stand one behind the other, none of them is
    padding. They are states with the tokens after them [n, 2 d]."""

    def __init__(self, head: HiddenDrafter, library: Any) -> None:
        config = head.config
        width, root = config.hidden_size, config.hidden_size**0.5
        layers = [
            LayerWeights(
                layer.before_attention.weight.detach().float() * root,
                tiles_of(layer.qkv.weight),
                tiles_of(layer.out.weight),
                layer.before_mlp.weight.detach().float() * root,
                tiles_of(layer.gate_up.weight),
                tiles_of(layer.down.weight),
            )
            for layer in head.layers
            if isinstance(layer, HeadLayer)
        ]
        sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        last = head.norm.weight.detach().float() * root
        self.layers = NativeLayers(library, layers, last, *sizes, config.rms_norm_eps)
        fuse = head.fuse.weight
        self.both = tiles_of(fuse)
        is_fused = config.kind == "lyanna" and config.fusion == "every"
        self.between = tiles_of(fuse[:, :width]) if is_fused else None
        first = head.layers[0]
        assert isinstance(first, HeadLayer)
        self.turn = rotations(first.frequencies(torch.device("cpu")), config.max_position_embeddings)

    def extend(self, cache: KVCache, ids: Sequence[int], given: Tensor, counts: Sequence[int]) -> Tensor:
        """Run and keep the next entries, `counts[r]` of each sequence; return the states [R, d] of the last ones."""
        rows, lengths = _rows(cache, ids)
        ends = np.cumsum(counts)
        each = np.arange(len(given)) - np.repeat(ends - counts, counts)
        rows, begun = np.repeat(rows, counts), np.repeat(lengths, counts)
        paths = begun[:, None] + np.arange(max(counts))
        found = self._run(given, self.both, cache, rows, begun, begun + each, begun + each, paths)
        cache.commit(ids, [range(count) for count in counts])
        return found[-1:] if len(ids) == 1 else found[torch.from_numpy(ends - 1)]

    def roll(self, cache: KVCache, ids: Sequence[int], states: Tensor, steps: int) -> list[Tensor]:
        """Run and keep states [R, d], then those that follow, and so on; return the `steps` states [R, d] that
        follow."""
        rows, lengths = _rows(cache, ids)
        paths = lengths[:, None] + np.arange(steps)
        places, given = paths.T.ravel(), states if self.between is not None else states.clone()
        found = self._run(given, self.between, cache, rows, lengths, places, places, paths, steps)
        cache.commit(ids, [range(steps)] * len(ids))
        return list(found.view(steps, len(ids), -1))

    def branch(self, cache: KVCache, ids: Sequence[int], given: Tensor, depth: int, seen: Tensor) -> Tensor:
        """Return the states [R w, d] of entries [R w, 2 d], see `HiddenLM.branch`."""
        width, back = seen.shape[1], seen.shape[2] - seen.shape[1]
        rows, lengths = (np.repeat(each, width) for each in _rows(cache, ids))
        begun = lengths - back
        # Ancestors stand in the order of their depths, as a parent comes before its children.
        paths = begun[:, None] + np.nonzero(seen.numpy())[2].reshape(-1, depth + 1)
        slots = lengths + np.tile(np.arange(width), len(ids))
        found = self._run(given, self.both, cache, rows, begun, slots, begun + depth, paths)
        cache.commit(ids, [range(width)] * len(ids))
        return found

    def _run(
        self,
        given: Tensor,
        fuse: Tiles | None,
        cache: KVCache,
        rows: Array,
        lengths: Array,
        slots: Array,
        places: Array,
        paths: Array,
        steps: int = 1,
    ) -> Tensor:
        """States [steps n, d]; entries as `TokenBatch` has them."""
        end = int(slots.max()) + 1  # no place is behind its slot
        cache.reserve(int(rows.max()) + 1, end)
        row, length, slot, place, path = (
            torch.from_numpy(np.ascontiguousarray(part, np.int32)) for part in (rows, lengths, slots, places, paths)
        )
        # Beyond its context stands a row that drafts as deep as its neighbours, for nothing.
        positions = place.clamp(max=len(self.turn[0]) - 1)
        batch = TokenBatch(row, positions, row, length, slot, place, path, end)
        cos, sin = (table[positions] for table in self.turn)
        found, _ = self.layers(given, batch, (cos, sin), cache, fuse=fuse, between=self.between, steps=steps)
        return found


@dataclass(frozen=True)
class Guess:
    """Tokens of a chain, how probable the head finds each, and their states' logits [n, S] without token information
    and old ones."""

    tokens: list[int]
    chances: list[float]
    logits: Tensor


class HeadChain:
    """Chains of argmax tokens for one sequence in one call of C: `draft_states` in `layers.c`.

    A head's layer is done in a tenth of a millisecond. What Python and torch do around it takes five times as long
    behind a target's forward, which leaves none of their code in the processor's caches.
    """

    def __init__(
        self,
        head: NativeHead,
        scores: Scores,
        hot: Tensor,
        information: NativeInformation | None,
        embeddings: Blocks | Tensor,
        is_eagle: bool,
    ) -> None:
        """`embeddings` [V, d]: the target's, bfloat16 where they are no blocks."""
        self._made = head, scores, hot, information, embeddings, is_eagle
        self._head, self._out, layers = head, scores.out, head.layers
        d = layers.width
        self._batch = OwnBatch(layers, PENDING, PENDING + LONGEST, PENDING**2 + LONGEST)
        found, sums = room(LONGEST, d), room(-(-self._out // LANES) * LANES)
        entry, halves = room(PENDING, 2 * d, dtype=torch.bfloat16), Halves(LONGEST, d)
        own = room(len(sums), dtype=torch.bfloat16)
        self._behind: Any = (ctypes.c_int64 * PENDING)()
        self._drafted, self._chances = (ctypes.c_int64 * LONGEST)(), (ctypes.c_float * LONGEST)()
        self._scores, nothing = scores.argument, TileArgument()
        if isinstance(embeddings, Blocks):
            stored = (part.data_ptr() for part in (embeddings.codes, embeddings.scales, embeddings.least))
            codes, steps, least = stored
            embed = HeadArgument(None, codes, None, steps, least, None, *embeddings.codes.shape)
        else:
            embed = HeadArgument(None, None, None, None, None, embeddings.data_ptr(), *embeddings.shape)
        self._vocab_size = embed.out
        self._guess = GuessArgument(
            embed=embed,
            both=head.both.argument,
            alone=nothing,
            between=nothing if head.between is None else head.between.argument,
            answer=nothing if information is None else information.answer.argument,
            tokens=None if information is None else information.states.data_ptr(),
            cos=head.turn[0].data_ptr(),
            sin=head.turn[1].data_ptr(),
            hot=hot.data_ptr(),
            found=found.data_ptr(),
            sums=sums.data_ptr(),
            chances=ctypes.addressof(self._chances),
            drafted=ctypes.addressof(self._drafted),
            entry=entry.data_ptr(),
            own=own.data_ptr(),
            halves=halves.argument,
            room=self._batch.argument.room,
            sees=is_eagle,
            longest=LONGEST,
            positions=len(head.turn[0]),
        )
        self._kept: Any = found, sums, entry, halves, own  # C knows addresses alone
        self._logits = room(0, self._out)

    def fresh(self) -> HeadChain:
        """Return the same for another cache, with buffers of its own."""
        return HeadChain(*self._made)

    def fits(self, length: int, count: int, most: int) -> bool:
        """Return whether it can draft `most` tokens after `length` entries and `count` new ones."""
        return 0 < count <= PENDING and most <= LONGEST and length + count + most <= len(self._head.turn[0])

    def __call__(
        self,
        cache: KVCache,
        id: int,
        given: Tensor,
        behind: Sequence[int],
        root: int,
        most: int,
        start: int = 0,
        old: Tensor | None = None,
        weight: float = 0.0,
    ) -> Guess:
        """Run and keep the features `given` [n, d] with the tokens after them; draft `most` tokens after `root`.

        With a `start` continue the draft of that length that the last call made of the same features.

        Raises IndexError for a token outside the vocabulary.
        """
        row, guess, count, last = cache.row(id), self._guess, len(given), start + most
        if not 0 <= root < self._vocab_size or not all(0 <= token < self._vocab_size for token in behind):
            raise IndexError(f"a token is outside the head's vocabulary of {self._vocab_size}")
        length = cache.lengths[row] - (count if start else 0)
        assert self.fits(length, count, last) and (old is None or old.is_contiguous())
        if not start:  # later calls must find the entries of the first
            cache.reserve(row + 1, length + count + LONGEST)
        self._batch.point_at(cache)
        given, logits = given.float().contiguous(), room(last, self._out)
        logits[:start] = self._logits[:start]
        self._logits = logits
        guess.behind = ctypes.addressof(self._behind)
        self._behind[: len(behind)] = list(behind)
        guess.given, guess.logits, guess.old = (
            given.data_ptr(),
            logits.data_ptr(),
            None if old is None else old.data_ptr(),
        )
        guess.at, guess.length, guess.count, guess.start, guess.most = row, length, count, start, most
        guess.olds, guess.root, guess.weight = 0 if old is None else len(old), root, weight
        arguments = (ctypes.byref(each) for each in (self._batch.each, self._batch.argument, self._scores, guess))
        self._head.layers.library.draft_states(*arguments)
        cache.lengths[row] = length + count
        return Guess(self._drafted[start:last], self._chances[start:last], logits)


def head_chain(
    head: NativeHead,
    scores: Any,
    hot: Tensor,
    information: NativeInformation | None,
    embeddings: nn.Module,
    is_eagle: bool,
) -> HeadChain | None:
    """Return None if C cannot draft: for an LM head with a bias, embeddings of another form or too large for a copy."""
    stored: Any = embeddings.stored if type(embeddings) is StoredEmbedding else None
    if type(embeddings) is nn.Embedding and embeddings.weight.numel() <= LARGEST_TABLE:
        stored = embeddings.weight.detach().bfloat16()
    if isinstance(stored, Blocks):
        stored = stored if all(part.is_contiguous() for part in (stored.codes, stored.scales, stored.least)) else None
    elif stored is not None:
        stored = stored.contiguous()
    if stored is None or not isinstance(scores, Scores) or scores.tiles is None:
        return None
    return HeadChain(head, scores, hot, information, stored, is_eagle)


def native_head(head: HiddenDrafter) -> NativeHead | None:
    """Return None without our product, and for sizes that C cannot do."""
    config = head.config
    size = config.head_dim
    sizes = config.hidden_size, config.intermediate_size, size
    if not has_tiles() or any(each % BLOCK for each in sizes) or size > LARGEST_HEAD:
        return None
    return NativeHead(head, library())


def tiles_of(weight: Tensor) -> Tiles:
    """Return a float weight in 8 bits, of sizes that our product can do."""
    found = stored(weight.detach().float().contiguous(), "int8")
    assert isinstance(found, Tiles)
    return found


def _rows(cache: KVCache, ids: Sequence[int]) -> tuple[Array, Array]:
    """Return each sequence's row and its committed length."""
    rows = [cache.row(id) for id in ids]
    return np.array(rows), np.array([cache.lengths[row] for row in rows])
