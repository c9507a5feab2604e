"""OLMo 2 and 3: norms only after attention and MLPs, and of all heads together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.backends.architectures.architecture import (
    FULL,
    HEAD_NORM_TENSORS,
    LLAMA_TENSORS,
    LOCAL,
    POST_NORM_TENSORS,
    Architecture,
    Settings,
    layer_tables,
    model_table,
    post_norm_layer,
    rotation_of,
    rotations_by_kind,
    windowed_layer_types,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import ModelTable

_FULL_EVERY = 4


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    window = metadata.value("attention.sliding_window", int, 0)
    if not window:
        return {}
    layers = settings["num_hidden_layers"]
    base = settings["rope_parameters"]["rope_theta"]
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": windowed_layer_types(metadata, layers, _FULL_EVERY),
        "rope_parameters": rotations_by_kind(settings, base),
    }


def _table(model: Any) -> ModelTable:
    rotary = model.model.rotary_emb
    types: list[str] | None = getattr(model.config, "layer_types", None)
    if not types:  # OLMo 2
        return model_table(model, layer_tables(model, post_norm_layer))
    kinds = [kind for kind in (LOCAL, FULL) if kind in types]
    layers = [
        replace(layer, rotation=kinds.index(kind))
        for layer, kind in zip(layer_tables(model, post_norm_layer), types, strict=True)
    ]
    rotations = [rotation_of(rotary, kind) for kind in kinds]
    return model_table(model, layers, rotations=rotations)


OLMO2 = Architecture(
    name="olmo2",
    classes=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    table=_table,
    tensors=LLAMA_TENSORS | HEAD_NORM_TENSORS | POST_NORM_TENSORS,
    settings=_settings,
)
