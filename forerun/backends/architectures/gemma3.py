"""Gemma 3's text models: norms on both sides, and two rotations."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    FULL,
    HEAD_NORM_TENSORS,
    LLAMA_TENSORS,
    LOCAL,
    POST_NORM_TENSORS,
    Architecture,
    Settings,
    layer_table,
    model_table,
    rotation_of,
    rotations_by_kind,
    shifted_gain,
    shifted_norm,
    windowed_layer_types,
    windows_of,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable

GEMMA_TENSORS = LLAMA_TENSORS | POST_NORM_TENSORS | {"pre_feedforward_layernorm": "ffn_norm"}
_FULL_EVERY = 6
_LAYERS_OF_27B = 62  # only this model divides scores by another number than the size of a head
_LOCAL_BASE = 10000.0


def gemma_layer(layer: Any, **changes: Any) -> LayerTable:
    """Return the table of a layer with norms on both sides, whose gains are 1 + their weights."""
    return layer_table(
        layer,
        attention_norm=shifted_norm(layer.input_layernorm),
        attention_after=shifted_norm(layer.post_attention_layernorm),
        mlp_norm=shifted_norm(layer.pre_feedforward_layernorm),
        mlp_after=shifted_norm(layer.post_feedforward_layernorm),
        **changes,
    )


def gemma_model(model: Any, layers: list[LayerTable], **changes: Any) -> ModelTable:
    """Return the table of a Gemma 2 or 3."""
    config = model.config
    return model_table(
        model,
        layers,
        norm=shifted_norm(model.model.norm),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        score_cap=config.attn_logit_softcapping or 0.0,
        logit_cap=config.final_logit_softcapping or 0.0,
        embedding_factor=config.hidden_size**0.5,
        **changes,
    )


def query_scalar(settings: Settings, layers_of_27b: int) -> int:
    """Return the number whose root divides scores (`query_pre_attn_scalar`); no file says it."""
    head_size: int = settings["head_dim"]
    if settings["num_hidden_layers"] != layers_of_27b:
        return head_size
    share: int = settings["hidden_size"] // settings["num_attention_heads"]
    return share


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    layers = settings["num_hidden_layers"]
    base = metadata.number("rope.freq_base_swa", float, _LOCAL_BASE)
    return {
        "query_pre_attn_scalar": query_scalar(settings, _LAYERS_OF_27B),
        "sliding_window": metadata.number("attention.sliding_window", int),
        "layer_types": windowed_layer_types(metadata, layers, _FULL_EVERY),
        "rope_parameters": rotations_by_kind(settings, base),
        "final_logit_softcapping": metadata.value("final_logit_softcapping", float, 0.0) or None,
    }


def _table(model: Any) -> ModelTable:
    config = model.config
    kinds = [kind for kind in (LOCAL, FULL) if kind in config.layer_types]
    layers = [
        gemma_layer(
            layer,
            q_norm=shifted_gain(layer.self_attn.q_norm),
            k_norm=shifted_gain(layer.self_attn.k_norm),
            rotation=kinds.index(kind),
            window=window,
            activation=config.hidden_activation,
        )
        for layer, kind, window in zip(
            model.model.layers, config.layer_types, windows_of(config), strict=True
        )
    ]
    rotations = [rotation_of(model.model.rotary_emb, kind) for kind in kinds]
    return gemma_model(model, layers, rotations=rotations)


GEMMA3 = Architecture(
    name="gemma3",
    classes=("Gemma3ForCausalLM",),
    table=_table,
    tensors=GEMMA_TENSORS | HEAD_NORM_TENSORS,
    settings=_settings,
    norm_offset=1.0,
)
