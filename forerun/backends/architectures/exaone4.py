"""EXAONE 4: norms only after attention and MLPs, and full layers that do not rotate."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    HEAD_NORM_TENSORS,
    LLAMA_TENSORS,
    Architecture,
    Settings,
    model_table,
    post_norm_layer,
    windowed_layer_types,
    windows_of,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import ModelTable

_FULL_EVERY = 4


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    layers = settings["num_hidden_layers"]
    window = metadata.value("attention.sliding_window", int, 0)
    if not window:  # the small models have none
        kinds = ["full_attention"] * layers
        metadata.per_layer("attention.sliding_window_pattern", layers)
        return {"sliding_window": None, "sliding_window_pattern": 0, "layer_types": kinds}
    kinds = windowed_layer_types(metadata, layers, _FULL_EVERY)
    return {"sliding_window": window, "layer_types": kinds}


def _table(model: Any) -> ModelTable:
    config = model.config
    layers = []
    for layer, window in zip(model.model.layers, windows_of(config), strict=True):
        is_rotated = bool(window) or config.sliding_window is None
        layers.append(
            post_norm_layer(
                layer,
                rotation=0 if is_rotated else None,
                window=window,
                activation=config.hidden_act,
            )
        )
    return model_table(model, layers)


EXAONE4 = Architecture(
    name="exaone4",
    classes=("Exaone4ForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS
    | HEAD_NORM_TENSORS
    | {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    settings=_settings,
)
