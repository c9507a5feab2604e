"""SmolLM3, some of whose layers do not rotate."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    Architecture,
    Settings,
    layer_table,
    model_table,
    windows_of,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    return {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_up.bias"),
    }


def _table(model: Any) -> ModelTable:
    layers = [
        layer_table(
            layer,
            rotation=0 if layer.self_attn.use_rope else None,
            window=window,
            activation=model.config.hidden_act,
        )
        for layer, window in zip(model.model.layers, windows_of(model.config), strict=True)
    ]
    return model_table(model, layers)


SMOLLM3 = Architecture(
    name="smollm3",
    classes=("SmolLM3ForCausalLM",),
    table=_table,
    settings=_settings,
    are_halves_interleaved=True,
)
