"""Phi-3 and Phi-4: matrices of queries, keys and values, and of gate and up, in one."""

from __future__ import annotations

from typing import Any

from torch import nn

from forerun.backends.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    Settings,
    layer_tables,
    model_table,
    norms_before,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    context = settings["max_position_embeddings"]
    window = metadata.value("attention.sliding_window", int, 0)
    return {"sliding_window": window if 0 < window < context else None}


def _layer(layer: Any, **changes: Any) -> LayerTable:
    return LayerTable(
        q=layer.self_attn.qkv_proj,
        o=layer.self_attn.o_proj,
        gate=layer.mlp.gate_up_proj,
        down=layer.mlp.down_proj,
        **norms_before(layer),
        **changes,
    )


def _table(model: Any) -> ModelTable:
    return model_table(model, layer_tables(model, _layer))


PHI3 = Architecture(
    name="phi3",
    classes=("Phi3ForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    settings=_settings,
    may_rotate_parts=True,
    plain_modules=(nn.Dropout,),
)
