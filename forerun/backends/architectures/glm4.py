"""GLM-4: norms on both sides, and heads of which neighbours are rotated in part."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    attention_bias_settings,
    attention_matrices,
    layer_tables,
    model_table,
    norm_of,
    norms_before,
    rotation_of,
)
from forerun.backends.table import LayerTable, ModelTable


def _layer(layer: Any, **changes: Any) -> LayerTable:
    return LayerTable(
        **attention_matrices(layer),
        gate=layer.mlp.gate_up_proj,
        down=layer.mlp.down_proj,
        **norms_before(layer),
        attention_after=norm_of(layer.post_self_attn_layernorm),
        mlp_after=norm_of(layer.post_mlp_layernorm),
        **changes,
    )


def _table(model: Any) -> ModelTable:
    rotation = rotation_of(model.model.rotary_emb, is_interleaved=True)
    return model_table(model, layer_tables(model, _layer), rotations=[rotation])


GLM4 = Architecture(
    name="glm4",
    classes=("Glm4ForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS
    | {
        "mlp.gate_up_proj": "ffn_up",
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    settings=attention_bias_settings,
    may_rotate_parts=True,
)
