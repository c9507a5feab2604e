"""EXAONE 4: norms only after attention and MLPs, and full layers that do not rotate."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    FULL,
    HEAD_NORM_TENSORS,
    LLAMA_TENSORS,
    POST_NORM_TENSORS,
    Architecture,
    Settings,
    layer_tables,
    model_table,
    post_norm_layer,
    windowed_layer_types,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable

_FULL_EVERY = 4


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    layers = settings["num_hidden_layers"]
    window = metadata.value("attention.sliding_window", int, 0)
    if not window:  # the small models have none
        kinds = [FULL] * layers
        metadata.per_layer("attention.sliding_window_pattern", layers)
        return {"sliding_window": None, "sliding_window_pattern": 0, "layer_types": kinds}
    kinds = windowed_layer_types(metadata, layers, _FULL_EVERY)
    return {"sliding_window": window, "layer_types": kinds}


def _table(model: Any) -> ModelTable:
    has_windows = model.config.sliding_window is not None

    def layer_of(layer: Any, window: int, **changes: Any) -> LayerTable:
        rotation = 0 if window or not has_windows else None
        return post_norm_layer(layer, rotation=rotation, window=window, **changes)

    return model_table(model, layer_tables(model, layer_of))


EXAONE4 = Architecture(
    name="exaone4",
    classes=("Exaone4ForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS | HEAD_NORM_TENSORS | POST_NORM_TENSORS,
    settings=_settings,
)
