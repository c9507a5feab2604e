"""OLMo 2 and 3: norms only after attention and MLPs, and of all heads together."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    HEAD_NORM_TENSORS,
    LLAMA_TENSORS,
    Architecture,
    Settings,
    model_table,
    post_norm_layer,
    rotation_of,
    windowed_layer_types,
    windows_of,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import ModelTable

_FULL_EVERY = 4
_KINDS = ("sliding_attention", "full_attention")


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    window = metadata.value("attention.sliding_window", int, 0)
    if not window:
        return {}
    layers = settings["num_hidden_layers"]
    theta = settings["rope_parameters"]["rope_theta"]
    # YaRN scales the full layers only.
    local = {"rope_type": "default", "rope_theta": theta}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": windowed_layer_types(metadata, layers, _FULL_EVERY),
        "rope_parameters": dict(zip(_KINDS, (local, settings["rope_parameters"]), strict=True)),
    }


def _table(model: Any) -> ModelTable:
    config = model.config
    kinds: list[str] = list(getattr(config, "layer_types", None) or [])
    chosen = [kind for kind in _KINDS if kind in kinds]
    layers = []
    for index, layer in enumerate(model.model.layers):
        rotation = chosen.index(kinds[index]) if chosen else 0
        window = windows_of(config)[index] if chosen else 0
        layers.append(
            post_norm_layer(layer, rotation=rotation, window=window, activation=config.hidden_act)
        )
    rotary = model.model.rotary_emb
    rotations = [rotation_of(rotary, kind) for kind in chosen] or [rotation_of(rotary)]
    return model_table(model, layers, rotations=rotations)


OLMO2 = Architecture(
    name="olmo2",
    classes=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    table=_table,
    tensors=LLAMA_TENSORS
    | HEAD_NORM_TENSORS
    | {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    settings=_settings,
)
