"""StarCoder 2: LayerNorms and biases, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from torch import nn

from forerun.backends.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    Settings,
    attention_matrices,
    layer_tables,
    model_table,
    norms_before,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    return {
        "use_bias": metadata.has("blk.0.attn_q.bias"),
        "sliding_window": None,  # llama.cpp knows none, so files do not say it
    }


def _layer(layer: Any, **changes: Any) -> LayerTable:
    return LayerTable(
        **attention_matrices(layer),
        gate=layer.mlp.c_fc,
        down=layer.mlp.c_proj,
        **norms_before(layer),
        **changes,
    )


def _table(model: Any) -> ModelTable:
    eps = model.config.norm_epsilon
    return model_table(model, layer_tables(model, _layer), eps=eps, are_norms_by_mean=True)


STARCODER2 = Architecture(
    name="starcoder2",
    classes=("Starcoder2ForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    settings=_settings,
    epsilon=("norm_epsilon", "attention.layer_norm_epsilon"),
    plain_modules=(nn.LayerNorm,),
)
