"""GLM-4: norms on both sides, and heads of which neighbours are rotated in part."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    Settings,
    model_table,
    norm_of,
    rotation_of,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias")}


def _table(model: Any) -> ModelTable:
    layers = [
        LayerTable(
            q=layer.self_attn.q_proj,
            k=layer.self_attn.k_proj,
            v=layer.self_attn.v_proj,
            o=layer.self_attn.o_proj,
            gate=layer.mlp.gate_up_proj,
            down=layer.mlp.down_proj,
            attention_norm=norm_of(layer.input_layernorm),
            attention_after=norm_of(layer.post_self_attn_layernorm),
            mlp_norm=norm_of(layer.post_attention_layernorm),
            mlp_after=norm_of(layer.post_mlp_layernorm),
            activation=model.config.hidden_act,
        )
        for layer in model.model.layers
    ]
    rotation = rotation_of(model.model.rotary_emb, is_interleaved=True)
    return model_table(model, layers, rotations=[rotation])


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
    settings=_settings,
    may_rotate_parts=True,
)
