"""Command R7B and Command A: attention and MLP side by side, and LayerNorms."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    Settings,
    layer_table,
    model_table,
    rotation_of,
    windowed_layer_types,
    windows_of,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import ModelTable

_FULL_EVERY = 4
_TENSORS = {name: stored for name, stored in LLAMA_TENSORS.items() if stored != "ffn_norm"}


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    layers = settings["num_hidden_layers"]
    return {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "logit_scale": metadata.number("logit_scale", float),
        "sliding_window": metadata.number("attention.sliding_window", int),
        "layer_types": windowed_layer_types(metadata, layers, _FULL_EVERY),
    }


def _table(model: Any) -> ModelTable:
    config = model.config
    layers = []
    for layer, window in zip(model.model.layers, windows_of(config), strict=True):
        layers.append(
            layer_table(
                layer,
                mlp_norm=None,
                is_parallel=True,
                rotation=0 if window else None,
                window=window,
                activation=config.hidden_act,
            )
        )
    rotation = rotation_of(model.model.rotary_emb, is_interleaved=True)
    return model_table(
        model,
        layers,
        rotations=[rotation],
        eps=config.layer_norm_eps,
        are_norms_by_mean=True,
        logit_factor=config.logit_scale,
    )


COHERE2 = Architecture(
    name="cohere2",
    classes=("Cohere2ForCausalLM",),
    table=_table,
    tensors=_TENSORS,
    settings=_settings,
    epsilon=("layer_norm_eps", "attention.layer_norm_epsilon"),
)
