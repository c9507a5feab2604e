"""A head's layers in C (`forerun.backends.quantised`), with weights in 8 bits."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

from forerun.backends.panels import BLOCK, Panels, quantise
from forerun.backends.quantised import Layers, lay_out
from forerun.csrc.library import LayerArgument, ModelArgument, library
from forerun.heads.heads import HeadLayer, HiddenDrafter
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache


class QuantisedHead:
    """The layers of a lyanna or EAGLE-like head.

    Attributes:
        both, between: the first matrix's product with states and the tokens after them [n, 2 d], and with states alone
            (lyanna; an EAGLE-like head has no use for it).
        context: the most positions.
    """

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
        self.context, self.both = config.max_position_embeddings, _packed(head.fuse.weight)
        alone = head.fuse.weight[:, : config.hidden_size]
        self.between = _packed(alone) if config.kind == "lyanna" else self.both

    def __call__(self, inputs: Inputs, cache: KVCache) -> Tensor:
        """Return states [n, d] of inputs that have gone through the first matrix."""
        batch = lay_out(inputs, cache)
        # Beyond its context stands a row that drafts as deep as its neighbours, for nothing.
        np.minimum(batch.position, self.context - 1, out=batch.position)
        _, states = self.layers(batch, cache, states=inputs.given, normed=True)
        assert states is not None
        return states


def quantised_head(head: HiddenDrafter) -> QuantisedHead | None:
    """Return a head for the C library; None without it, and for sizes that it does not have."""
    config = head.config
    inputs = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    if library() is None or any(each % BLOCK for each in inputs) or config.head_dim % 16:
        return None
    return QuantisedHead(head)


def _packed(weight: Tensor) -> Panels:
    found = quantise(weight, Type.Q8_0)
    assert isinstance(found, Panels)
    return found
