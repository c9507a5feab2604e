"""A head's layers and its drafts in C, with weights in 8 bits (`forerun.backends.quantised`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from torch.nn import functional

from forerun.backends.panels import BLOCK, FORMATS, PLAIN, Panels, Product, Rows, quantise
from forerun.backends.quantised import Layers, Part, lay_out
from forerun.backends.stored import StoredEmbedding
from forerun.csrc.library import GrowthArgument, LayerArgument, ModelArgument, library
from forerun.heads.heads import HeadLayer, HiddenDrafter
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache


@dataclass(frozen=True)
class Growth:
    """Places of drafts that `fr_grow` found.

    Attributes:
        tokens, parents, found: [R, n, m] tokens, parents and values of the paths at each of n places, see
            `forerun.drafters.beams.Search`.
        states, logits: [n, R, d], and those of them alone [n, R, S], before old logits and token information.
    """

    tokens: np.ndarray
    parents: np.ndarray
    found: np.ndarray
    states: Tensor
    logits: Tensor


class Beams:
    """The beams of a draft of R rows in C, and how it goes on.

    Attributes:
        tokens, values: [R, w] see `forerun.drafters.beams.Search`; a call continues these and replaces them.
        start: places so far.
        ends: [R] the places that each row may have.
        nodes: the paths to find at a place.
        old: logits [o, S] that are added to those of each row's first o places, or None.
        curves: [R, n, 2] shift and slope of the calibration at each of the next n places, or None.
    """

    curves: np.ndarray | None = None

    def __init__(
        self,
        roots: Sequence[int],
        width: int,
        nodes: int,
        ends: Sequence[int],
        old: Sequence[Tensor | None] = (),
    ) -> None:
        self.tokens, self.values = (
            np.array([[root] * width for root in roots], np.int32),
            np.zeros((len(roots), width)),
        )
        self.values[:, 1:] = -np.inf
        self.start, self.nodes, self.ends = 0, nodes if width > 1 else 1, np.array(ends, np.int32)
        self.old = [
            each.contiguous() if each is not None else None for each in old or [None] * len(roots)
        ]


class QuantisedHead:
    """The layers of a lyanna or EAGLE-like head.

    Attributes:
        context: the number of positions.
    """

    def __init__(self, head: HiddenDrafter, embedding: Rows, logits: Panels) -> None:
        """Pack a head, with the target's `embedding` and the rows `logits` of its LM head for the hot set."""
        config = head.config
        layers = [layer for layer in head.layers if isinstance(layer, HeadLayer)]
        queries, keys = (
            count * config.head_dim
            for count in (config.num_attention_heads, config.num_key_value_heads)
        )
        arguments = (LayerArgument * len(layers))()
        kept: list[Any] = [arguments, embedding]

        def panels(weight: Tensor) -> Any:
            kept.append(_packed(weight))
            return kept[-1].argument

        def floats(vector: Tensor) -> int:
            kept.append(vector.detach().float().clone())
            return int(kept[-1].data_ptr())

        for at, layer in zip(arguments, layers, strict=True):
            at.q, at.k, at.v = map(panels, layer.qkv.weight.split((queries, keys, keys)))
            if layer.qkv.bias is not None:
                at.q_bias, at.k_bias, at.v_bias = map(
                    floats, layer.qkv.bias.split((queries, keys, keys))
                )
            at.gate, at.up = map(panels, layer.gate_up.weight.chunk(2))
            at.o, at.down, at.turned = (
                panels(layer.out.weight),
                panels(layer.down.weight),
                config.head_dim,
            )
            at.first, at.second = (
                floats(layer.before_attention.weight),
                floats(layer.before_mlp.weight),
            )
        argument = ModelArgument(
            d=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            size=config.head_dim,
            layers=len(layers),
            vocabulary=min(embedding.out, config.vocab_size),
            embed_format=FORMATS.index(embedding.type),
            layer=ctypes.addressof(arguments),
            norm=floats(head.norm.weight),
            embed=embedding.rows.ctypes.data,
            embed_row=embedding.rows.shape[1],
            fuse=panels(head.fuse.weight),
            eps=config.rms_norm_eps,
        )
        if config.kind == "lyanna":
            argument.alone = panels(head.fuse.weight[:, : config.hidden_size])
        self.layers = Layers(argument, layers[0].frequencies(torch.device("cpu")), 1.0, kept)
        self.context, self._logits = config.max_position_embeddings, logits
        self._hot = head.hot.cpu().numpy().astype(np.int32)
        self._answer: Panels | None = None
        self._states: Tensor | None = None
        if head.informed:
            fill = (0, -config.rank % BLOCK)
            self._states = functional.pad(
                head.token_states(torch.arange(config.vocab_size)).float(), fill
            )
            self._answer = _packed(functional.pad(head.answer.weight, fill))

    def __call__(self, inputs: Inputs, cache: KVCache, tokens: Tensor | None) -> Tensor:
        """Return the next states [n, d] after those of `inputs`, with the tokens [n] after these if given."""
        batch = lay_out(inputs, cache)
        # A row at its end drafts as deep as its neighbours; what lies beyond the context is not used.
        np.minimum(batch.position, self.context - 1, out=batch.position)
        ids = None if tokens is None else tokens.to(torch.int32).numpy()
        _, states = self.layers(batch, cache, tokens=ids, states=inputs.given, capture="head")
        assert states is not None
        return states

    def information(self, tokens: Tensor) -> Tensor:
        """Return the token information T [.., S] of tokens [..]."""
        assert self._answer is not None and self._states is not None
        return self._answer(self._states[tokens].flatten(0, -2)).view(*tokens.shape, -1)

    def grow(
        self,
        cache: KVCache,
        ids: Sequence[int],
        features: Tensor,
        tokens: Sequence[Sequence[int]],
        most: int,
        beams: Beams,
    ) -> Growth:
        """Draft `most` places of R rows after their features [n, d], which are kept, and the tokens after each of them;
        or continue a draft from its last states [R, d] with one token a row. `features` are overwritten."""
        rows, counts, start = (
            [cache.row(id) for id in ids],
            [len(own) for own in tokens],
            beams.start,
        )
        before = [cache.lengths[row] for row in rows]
        kept = (
            before
            if start
            else [length + count for length, count in zip(before, counts, strict=True)]
        )
        begins = [length + start - 1 for length in before] if start else before
        cache.reserve(max(rows) + 1, max(kept) + start + most - 1)
        shape = len(ids), most, beams.nodes
        paths = np.empty(shape, np.int32), np.empty(shape, np.int32), np.empty(shape)
        found = Growth(
            *paths,
            *(torch.empty(most, len(ids), size) for size in (self.layers.width, self._logits.out)),
        )
        numbers = {"row": rows, "length": begins, "count": counts, "limit": beams.ends}
        numbers["pending"] = [token for each in tokens for token in each]
        numbers["olds"] = [len(each) if each is not None else 0 for each in beams.old]
        parts: dict[str, Part] = {
            name: np.asarray(each, np.int32) for name, each in numbers.items()
        }
        parts["old"] = np.array(
            [each.data_ptr() if each is not None else 0 for each in beams.old], np.uint64
        )
        parts |= {
            "head": self._logits.argument,
            "names": self._hot,
            "features": features,
            "token_states": self._states,
        }
        parts |= {"information": None if self._answer is None else self._answer.argument}
        parts |= {"beams": beams.tokens, "values": beams.values}
        parts |= {
            "curves": None
            if beams.curves is None
            else np.ascontiguousarray(beams.curves, np.float32)
        }
        growth = GrowthArgument(
            rows=len(ids), n=sum(counts), start=start, most=most, width=beams.tokens.shape[1]
        )
        growth.nodes, growth.context = beams.nodes, self.context
        self.layers.run("fr_grow", cache, growth, **parts, **vars(found))
        beams.start += most
        for row, length in zip(rows, kept, strict=True):
            cache.lengths[row] = length + start + most - 1
        cache.crop_to(ids, kept)
        return found


def quantised_head(
    head: HiddenDrafter, embedding: nn.Module, logits: Product
) -> QuantisedHead | None:
    """Return a head that runs in C, with the target's embedding and its LM head's rows for the hot set; None without
    the library, or for sizes, an embedding or an LM head (one with a bias) that it does not support."""
    config = head.config
    inputs = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads * config.head_dim,
    )
    rows = embedding_rows(embedding)
    if (
        library() is None
        or rows is None
        or any(each % BLOCK for each in inputs)
        or config.head_dim % 16
    ):
        return None
    return QuantisedHead(head, rows, logits) if isinstance(logits, Panels) else None


def embedding_rows(embedding: nn.Module) -> Rows | None:
    """Return an embedding's rows, without a factor that it may have, or None for an unknown form."""
    if isinstance(embedding, StoredEmbedding):
        return embedding.stored
    if (
        not isinstance(embedding, nn.Embedding)
        or embedding._forward_hooks
        or embedding.weight.dtype not in PLAIN
    ):
        return None
    return Rows.plain(embedding.weight) if type(embedding.weight.data) is Tensor else None


def _packed(weight: Tensor) -> Panels:
    found = quantise(weight, Type.Q8_0)
    assert isinstance(found, Panels)
    return found
