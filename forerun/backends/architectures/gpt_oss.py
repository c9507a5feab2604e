"""gpt-oss: experts with biases and a clamped activation, and sinks of attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from forerun.backends.architectures.architecture import (
    EXPERT_TENSORS,
    LLAMA_TENSORS,
    Architecture,
    Settings,
    expert_counts,
    expert_layer,
    experts_table,
    layer_tables,
    model_table,
    windowed_layer_types,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.stored import StoredExperts, expert_activation
from forerun.backends.table import LayerTable, ModelTable

_FULL_EVERY = 2


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    count, chosen = expert_counts(metadata)
    layers = settings["num_hidden_layers"]
    size = metadata.number("expert_feed_forward_length", int, settings["intermediate_size"])
    rope = dict(settings["rope_parameters"])
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as in OpenAI's own code
    return {
        "intermediate_size": size,
        "num_local_experts": count,
        "num_experts_per_tok": chosen,
        "sliding_window": metadata.number("attention.sliding_window", int),
        "layer_types": windowed_layer_types(metadata, layers, _FULL_EVERY),
        "rope_parameters": rope,
    }


def _activation(experts: Any) -> str:
    if isinstance(experts, StoredExperts):
        return experts.activation
    return expert_activation(experts)


def _layer(config: Any, layer: Any, **changes: Any) -> LayerTable:
    experts = experts_table(
        layer.mlp.experts,
        layer.mlp.router,
        config.num_experts_per_tok,
        scoring="softmax of chosen",
    )
    # The configuration names another activation than the experts have.
    fields = changes | {"activation": _activation(layer.mlp.experts)}
    return expert_layer(layer, experts, sinks=layer.self_attn.sinks, **fields)


def _table(model: Any) -> ModelTable:
    return model_table(model, layer_tables(model, partial(_layer, model.config)))


GPT_OSS = Architecture(
    name="gpt-oss",
    classes=("GptOssForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS
    | {
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
        "self_attn": "attn_sinks",
    },
    expert_tensors={"mlp.experts": EXPERT_TENSORS},
    settings=_settings,
)
