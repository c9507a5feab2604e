"""Qwen3's mixtures of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from forerun.backends.architectures.architecture import (
    EXPERT_TENSORS,
    HEAD_NORM_TENSORS,
    LLAMA_TENSORS,
    Architecture,
    Settings,
    expert_counts,
    expert_layer,
    experts_table,
    head_norms,
    layer_table,
    layer_tables,
    model_table,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    count, chosen = expert_counts(metadata)
    return {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": metadata.number("expert_feed_forward_length", int),
        "norm_topk_prob": True,  # of all models, so that files do not say it
        "mlp_only_layers": [],
    }


def _layer(config: Any, layer: Any, **changes: Any) -> LayerTable:
    if not hasattr(layer.mlp, "experts"):
        return layer_table(layer, **head_norms(layer), **changes)
    experts = experts_table(
        layer.mlp.experts,
        layer.mlp.gate,
        config.num_experts_per_tok,
        are_weights_normed=config.norm_topk_prob,
    )
    return expert_layer(layer, experts, **head_norms(layer), **changes)


def _table(model: Any) -> ModelTable:
    return model_table(model, layer_tables(model, partial(_layer, model.config)))


QWEN3MOE = Architecture(
    name="qwen3moe",
    classes=("Qwen3MoeForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS | HEAD_NORM_TENSORS | {"mlp.gate": "ffn_gate_inp"},
    expert_tensors={"mlp.experts": EXPERT_TENSORS},
    settings=_settings,
)
