"""Command R7B and Command A: attention and MLP side by side, and LayerNorms."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    Settings,
    attention_matrices,
    layer_tables,
    mlp_matrices,
    model_table,
    norm_of,
    rotation_of,
    windowed_layer_types,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable

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


def _layer(layer: Any, window: int, **changes: Any) -> LayerTable:
    return LayerTable(
        **attention_matrices(layer),
        **mlp_matrices(layer.mlp),
        attention_norm=norm_of(layer.input_layernorm),
        is_parallel=True,
        rotation=0 if window else None,
        window=window,
        **changes,
    )


def _table(model: Any) -> ModelTable:
    config = model.config
    rotation = rotation_of(model.model.rotary_emb, is_interleaved=True)
    return model_table(
        model,
        layer_tables(model, _layer),
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
