"""Qwen2's mixtures of experts, with a shared expert that has a gate of its own."""

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
    layer_table,
    layer_tables,
    mlp_matrices,
    model_table,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import LayerTable, ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    count, chosen = expert_counts(metadata)
    # Older files do not say the sizes of experts.
    shared = metadata.value("expert_shared_feed_forward_length", int, 0)
    size = metadata.value("expert_feed_forward_length", int, 0)
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": size or settings["intermediate_size"] // chosen,
        "shared_expert_intermediate_size": shared or settings["intermediate_size"],
        "norm_topk_prob": False,
        "mlp_only_layers": [],
    }


def _layer(config: Any, layer: Any, **changes: Any) -> LayerTable:
    mlp = layer.mlp
    if not hasattr(mlp, "experts"):
        return layer_table(layer, **changes)
    experts = experts_table(
        mlp.experts,
        mlp.gate,
        config.num_experts_per_tok,
        are_weights_normed=config.norm_topk_prob,
        shared_gate=mlp.shared_expert_gate,
    )
    shared = mlp_matrices(mlp.shared_expert)
    return expert_layer(layer, experts, **shared, **changes)


def _table(model: Any) -> ModelTable:
    return model_table(model, layer_tables(model, partial(_layer, model.config)))


QWEN2MOE = Architecture(
    name="qwen2moe",
    classes=("Qwen2MoeForCausalLM",),
    table=_table,
    tensors=LLAMA_TENSORS
    | {
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
    },
    expert_tensors={"mlp.experts": EXPERT_TENSORS},
    settings=_settings,
)
