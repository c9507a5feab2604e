"""A head's layers in C (`forerun.backends.quantised`), with weights in 8 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

from forerun.backends.kernels import LayerArgument, ModelArgument, library
from forerun.backends.panels import BLOCK, Panels, quantise
from forerun.backends.quantised import FlatBatch, Layers
from forerun.heads.heads import HeadLayer, HiddenDrafter
from forerun.model.kv_cache import KVCache

Array = np.ndarray[Any, Any]


class QuantisedHead:
    """The layers of a lyanna or EAGLE-like head. New entries of sequences stand one behind the other, none of them is
    padding. They are states [n, d], or [n, 2 d] with the tokens after them."""

    def __init__(self, head: HiddenDrafter) -> None:
        config = head.config
        layers = [layer for layer in head.layers if isinstance(layer, HeadLayer)]
        queries, keys = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
        arguments = (LayerArgument * len(layers))()
        kept: list[Any] = [arguments]

        def panels(weight: Tensor) -> Any:
            kept.append(_packed(weight))
            return kept[-1].argument

        def gain(norm: nn.RMSNorm) -> int:
            kept.append(norm.weight.detach().float().clone())
            return int(kept[-1].data_ptr())

        for at, layer in zip(arguments, layers, strict=True):
            at.q, at.k, at.v = map(panels, layer.qkv.weight.split((queries, keys, keys)))
            at.gate, at.up = map(panels, layer.gate_up.weight.chunk(2))
            at.o, at.down, at.turned = panels(layer.out.weight), panels(layer.down.weight), config.head_dim
            at.first, at.second = gain(layer.before_attention), gain(layer.before_mlp)
        argument = ModelArgument(
            d=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            size=config.head_dim,
            layers=len(layers),
            layer=ctypes.addressof(arguments),
            norm=gain(head.norm),
            eps=config.rms_norm_eps,
        )
        self.layers = Layers(argument, layers[0].frequencies(torch.device("cpu")), 1.0, kept)
        self.width, self.context = config.hidden_size, config.max_position_embeddings
        self.both = _packed(head.fuse.weight)
        fused = config.kind == "lyanna" and config.fusion == "every"
        self.between = _packed(head.fuse.weight[:, : self.width]) if fused else None

    def extend(self, cache: KVCache, ids: Sequence[int], given: Tensor, counts: Sequence[int]) -> Tensor:
        """Runs and keeps the next entries, `counts[r]` of each sequence; the states [R, d] behind the last ones."""
        rows, lengths = _rows(cache, ids)
        ends = np.cumsum(counts)
        slots = np.repeat(lengths, counts) + np.arange(len(given)) - np.repeat(ends - counts, counts)
        found = self._run(given, self.both, cache, np.repeat(rows, counts), slots, slots, slots + 1)
        cache.commit(ids, [range(count) for count in counts])
        return found[torch.from_numpy(ends - 1)]

    def roll(self, cache: KVCache, ids: Sequence[int], states: Tensor, steps: int) -> list[Tensor]:
        """Runs and keeps states [R, d], then those that come of them, and so on: the `steps` states [R, d] that
        come."""
        rows, lengths = _rows(cache, ids)
        found = []
        for slots in (lengths + step for step in range(steps)):
            states = self._run(states, self.between, cache, rows, slots, slots, slots + 1)
            found.append(states)
        cache.commit(ids, [range(steps)] * len(ids))
        return found

    def branch(self, cache: KVCache, ids: Sequence[int], given: Tensor, depth: int, seen: Tensor) -> Tensor:
        """`HiddenLM.branch`, of entries [R w, 2 d]; the states [R w, d] behind them."""
        width, back = seen.shape[1], seen.shape[2] - seen.shape[1]
        rows, lengths = (np.repeat(each, width) for each in _rows(cache, ids))
        begun = lengths - back
        # Ancestors stand in the order of their depths, as a parent comes before its children.
        paths = begun[:, None] + np.nonzero(seen.numpy())[2].reshape(-1, depth + 1)
        slots = lengths + np.tile(np.arange(width), len(ids))
        found = self._run(given, self.both, cache, rows, slots, begun + depth, begun, paths)
        cache.commit(ids, [range(width)] * len(ids))
        return found

    def _run(
        self,
        given: Tensor,
        fuse: Panels | None,
        cache: KVCache,
        rows: Array,
        slots: Array,
        places: Array,
        lengths: Array,
        paths: Array | None = None,
    ) -> Tensor:
        """States [n, d] behind entries; see `FlatBatch`."""
        cache.reserve(int(rows.max()) + 1, int(slots.max()) + 1)
        # Beyond its context stands a row that drafts as deep as its neighbours, for nothing.
        places = places.clip(max=self.context - 1)
        batch = FlatBatch(_int32(rows), _int32(slots), _int32(places), _int32(lengths))
        if paths is not None:
            batch = replace(batch, seen=np.full(len(paths), paths.shape[1], np.int32), paths=_int32(paths))
        _, states, _ = self.layers(batch, cache, states=given if fuse is None else fuse(given), normed=True)
        assert states is not None
        return states


def quantised_head(head: HiddenDrafter) -> QuantisedHead | None:
    """None without the C library, and for sizes that it does not have."""
    config = head.config
    inputs = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    if library() is None or any(each % BLOCK for each in inputs) or config.head_dim % 16:
        return None
    return QuantisedHead(head)


def _int32(values: Array) -> Array:
    return np.ascontiguousarray(values, np.int32)


def _packed(weight: Tensor) -> Panels:
    found = quantise(weight, Type.Q8_0)
    assert isinstance(found, Panels)
    return found


def _rows(cache: KVCache, ids: Sequence[int]) -> tuple[Array, Array]:
    """Of each sequence its row, and the committed length of that."""
    rows = [cache.row(id) for id in ids]
    return np.array(rows), np.array([cache.lengths[row] for row in rows])
