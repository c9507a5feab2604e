"""Qwen3, whose queries and keys are normed head by head."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    HEAD_NORM_TENSORS,
    LLAMA_TENSORS,
    Architecture,
    Settings,
    layer_table,
    model_table,
    windows_of,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias")}


def _table(model: Any) -> ModelTable:
    layers = [
        layer_table(
            layer,
            q_norm=layer.self_attn.q_norm.weight,
            k_norm=layer.self_attn.k_norm.weight,
            window=window,
            activation=model.config.hidden_act,
        )
        for layer, window in zip(model.model.layers, windows_of(model.config), strict=True)
    ]
    return model_table(model, layers)


QWEN3 = Architecture(
    name="qwen3",
    classes=("Qwen3ForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS | HEAD_NORM_TENSORS,
    settings=_settings,
)
