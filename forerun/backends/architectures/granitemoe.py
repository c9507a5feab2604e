"""Granite 3's mixtures of experts."""

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


def _layer(config: Any, layer: Any, **changes: Any) -> LayerTable:
    experts = experts_table(
        layer.block_sparse_moe.experts,
        layer.block_sparse_moe.router,
        config.num_experts_per_tok,
        scoring="softmax of chosen",
    )
    return expert_layer(layer, experts, **changes)


def _table(model: Any) -> ModelTable:
    config = model.config
    layers = layer_tables(model, partial(_layer, config))
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
