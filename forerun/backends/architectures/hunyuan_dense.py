"""Hunyuan's dense models, which norm queries and keys after their rotation."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    Settings,
    layer_table,
    model_table,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias")}


def _table(model: Any) -> ModelTable:
    layers = [
        layer_table(
            layer,
            q_norm=layer.self_attn.query_layernorm.weight,
            k_norm=layer.self_attn.key_layernorm.weight,
            are_heads_normed_rotated=True,
            activation=model.config.hidden_act,
        )
        for layer in model.model.layers
    ]
    return model_table(model, layers)


HUNYUAN_DENSE = Architecture(
    name="hunyuan-dense",
    classes=("HunYuanDenseV1ForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS
    | {
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
    },
    settings=_settings,
)
