"""Qwen3, whose queries and keys are normed head by head."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    HEAD_NORM_TENSORS,
    LLAMA_TENSORS,
    Architecture,
    attention_bias_settings,
    head_norms,
    layer_table,
    layer_tables,
    model_table,
)
from forerun.backends.table import LayerTable, ModelTable


def _layer(layer: Any, **changes: Any) -> LayerTable:
    return layer_table(layer, **head_norms(layer), **changes)


def _table(model: Any) -> ModelTable:
    return model_table(model, layer_tables(model, _layer))


QWEN3 = Architecture(
    name="qwen3",
    classes=("Qwen3ForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS | HEAD_NORM_TENSORS,
    settings=attention_bias_settings,
)
