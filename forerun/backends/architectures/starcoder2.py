"""StarCoder 2: LayerNorms and biases, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from torch import nn

from forerun.backends.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    Settings,
    model_table,
    norm_of,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    return {
        "use_bias": metadata.has("blk.0.attn_q.bias"),
        "sliding_window": None,  # llama.cpp knows none, so files do not say it
    }


def _table(model: Any) -> ModelTable:
    config = model.config
    layers = [
        LayerTable(
            q=layer.self_attn.q_proj,
            k=layer.self_attn.k_proj,
            v=layer.self_attn.v_proj,
            o=layer.self_attn.o_proj,
            gate=layer.mlp.c_fc,
            down=layer.mlp.c_proj,
            attention_norm=norm_of(layer.input_layernorm),
            mlp_norm=norm_of(layer.post_attention_layernorm),
            window=config.sliding_window or 0,
            activation=config.hidden_act,
        )
        for layer in model.model.layers
    ]
    return model_table(model, layers, eps=config.norm_epsilon, are_norms_by_mean=True)


STARCODER2 = Architecture(
    name="starcoder2",
    classes=("Starcoder2ForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    settings=_settings,
    epsilon=("norm_epsilon", "attention.layer_norm_epsilon"),
    plain_modules=(nn.LayerNorm,),
)
