"""SmolLM3, some of whose layers do not rotate."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    Architecture,
    Settings,
    layer_table,
    layer_tables,
    model_table,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    return {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_up.bias"),
    }


def _layer(layer: Any, **changes: Any) -> LayerTable:
    return layer_table(layer, rotation=0 if layer.self_attn.use_rope else None, **changes)


def _table(model: Any) -> ModelTable:
    return model_table(model, layer_tables(model, _layer))


SMOLLM3 = Architecture(
    name="smollm3",
    classes=("SmolLM3ForCausalLM",),
    table=_table,
    settings=_settings,
    are_halves_interleaved=True,
)
