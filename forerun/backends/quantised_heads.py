"""A head's layers and its chains in C, with weights in 8 bits (`forerun.backends.quantised`)."""

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
from forerun.backends.quantised import Layers, lay_out
from forerun.backends.stored import StoredEmbedding
from forerun.csrc.library import ChainArgument, LayerArgument, ModelArgument, library, run
from forerun.heads.heads import HeadLayer, HiddenDrafter
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache


@dataclass(frozen=True)
class HeadDraft:
    """A drafted chain: its tokens, the head's probability of each, and the logits [n, S] of the head's states alone,
    before token information and old logits are added."""

    tokens: list[int]
    probabilities: list[float]
    logits: Tensor


class QuantisedHead:
    """The layers of a lyanna or EAGLE-like head.

    Attributes:
        context: the number of positions.
    """

    def __init__(self, head: HiddenDrafter, embedding: Rows, logits: Panels) -> None:
        """Pack a head, with the target's `embedding` and the rows `logits` of its LM head for the hot set."""
        config = head.config
        layers = [layer for layer in head.layers if isinstance(layer, HeadLayer)]
        queries, keys = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
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
                at.q_bias, at.k_bias, at.v_bias = map(floats, layer.qkv.bias.split((queries, keys, keys)))
            at.gate, at.up = map(panels, layer.gate_up.weight.chunk(2))
            at.o, at.down, at.turned = panels(layer.out.weight), panels(layer.down.weight), config.head_dim
            at.first, at.second = floats(layer.before_attention.weight), floats(layer.before_mlp.weight)
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
        if head.informed:
            fill = (0, -config.rank % BLOCK)
            self._states = functional.pad(head.token_states(torch.arange(config.vocab_size)).float(), fill)
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
        assert self._answer is not None
        return self._answer(self._states[tokens].flatten(0, -2)).view(*tokens.shape, -1)

    def chain(
        self,
        cache: KVCache,
        id: int,
        states: Tensor,
        tokens: Sequence[int],
        most: int,
        start: int,
        old: Tensor | None,
        weight: float,
    ) -> HeadDraft:
        """Draft `most` argmax tokens after features `states` [n, d], which are kept, and the tokens after them. With a
        `start`, continue a draft of that length from its last state [1, d] and token. `states` are overwritten."""
        length, count = cache.length(id), len(tokens)
        begin, kept = (length + start - 1, length) if start else (length, length + count)
        end, row = begin + count + most - 1, cache.row(id)
        cache.reserve(row + 1, end)
        self.layers.rotate_to(cache.capacity)
        logits, drafted = torch.empty(most, self._logits.out), np.empty(most, np.int32)
        pending, probs = np.asarray(tokens, np.int32), np.empty(most, np.float32)
        chain = ChainArgument(row=row, length=begin, count=count, most=most, start=start, turn=1, top_p=1)
        chain.head, chain.names = ctypes.addressof(self._logits.argument), self._hot.ctypes.data
        chain.pending, chain.drafted, chain.probabilities = (each.ctypes.data for each in (pending, drafted, probs))
        chain.states, chain.logits = states.data_ptr(), logits.data_ptr()
        if old is not None:
            old = old.contiguous()
            chain.old, chain.olds, chain.weight = old.data_ptr(), len(old), weight
        if self._answer is not None:
            chain.information, chain.token_states = ctypes.addressof(self._answer.argument), self._states.data_ptr()
        run("fr_chain", ctypes.byref(self.layers.model), self.layers.cache(cache), ctypes.byref(chain))
        cache.lengths[row] = end
        cache.crop_to([id], [kept])
        return HeadDraft(drafted.tolist(), probs.tolist(), logits)


def quantised_head(head: HiddenDrafter, embedding: nn.Module, logits: Product) -> QuantisedHead | None:
    """Return a head that runs in C, with the target's embedding and its LM head's rows for the hot set; None without
    the library, or for sizes, an embedding or an LM head (one with a bias) that it does not support."""
    config = head.config
    inputs = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    rows = embedding_rows(embedding)
    if library() is None or rows is None or any(each % BLOCK for each in inputs) or config.head_dim % 16:
        return None
    return QuantisedHead(head, rows, logits) if isinstance(logits, Panels) else None


def embedding_rows(embedding: nn.Module) -> Rows | None:
    """Return an embedding's rows, without a factor that it may have, or None for an unknown form."""
    if isinstance(embedding, StoredEmbedding):
        return embedding.stored
    if not isinstance(embedding, nn.Embedding) or embedding._forward_hooks or embedding.weight.dtype not in PLAIN:
        return None
    return Rows.plain(embedding.weight) if type(embedding.weight.data) is Tensor else None


def _packed(weight: Tensor) -> Panels:
    found = quantise(weight, Type.Q8_0)
    assert isinstance(found, Panels)
    return found
