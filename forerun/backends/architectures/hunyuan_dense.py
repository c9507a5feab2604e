"""Hunyuan's dense models, which norm queries and keys after their rotation."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    attention_bias_settings,
    layer_table,
    layer_tables,
    model_table,
)
from forerun.backends.table import LayerTable, ModelTable


def _layer(layer: Any, **changes: Any) -> LayerTable:
    return layer_table(
        layer,
        q_norm=layer.self_attn.query_layernorm.weight,
        k_norm=layer.self_attn.key_layernorm.weight,
        are_heads_normed_rotated=True,
        **changes,
    )


def _table(model: Any) -> ModelTable:
    return model_table(model, layer_tables(model, _layer))


HUNYUAN_DENSE = Architecture(
    name="hunyuan-dense",
    classes=("HunYuanDenseV1ForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS
    | {
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
    },
    settings=attention_bias_settings,
)
