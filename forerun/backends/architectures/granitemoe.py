"""Granite 3's mixtures of experts."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    EXPERT_TENSORS,
    LLAMA_TENSORS,
    Architecture,
    Settings,
    attention_of,
    expert_counts,
    experts_table,
    model_table,
)
from forerun.backends.architectures.granite import granite_factors, granite_settings
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    count, chosen = expert_counts(metadata)
    return granite_settings(metadata, settings) | {
        "num_local_experts": count,
        "num_experts_per_tok": chosen,
    }


def _table(model: Any) -> ModelTable:
    config = model.config
    layers = []
    for layer in model.model.layers:
        experts = experts_table(
            layer.block_sparse_moe.experts,
            layer.block_sparse_moe.router,
            config.num_experts_per_tok,
            scoring="softmax of chosen",
        )
        layers.append(
            LayerTable(**attention_of(layer), experts=experts, activation=config.hidden_act)
        )
    return model_table(model, layers, **granite_factors(config))


GRANITEMOE = Architecture(
    name="granitemoe",
    classes=("GraniteMoeForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS | {"block_sparse_moe.router": "ffn_gate_inp"},
    expert_tensors={"block_sparse_moe.experts": EXPERT_TENSORS},
    settings=_settings,
    are_halves_interleaved=True,
)
