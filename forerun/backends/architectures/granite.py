"""Granite 3's dense models: Llama with four factors."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import Architecture, Settings, llama_table
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import ModelTable


def granite_settings(metadata: Metadata, settings: Settings) -> Settings:
    """Return the factors of a Granite model."""
    default_scale = settings["head_dim"] ** -0.5
    return {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_up.bias"),
        "attention_multiplier": metadata.number("attention.scale", float, default_scale),
        "embedding_multiplier": metadata.number("embedding_scale", float, 1.0),
        "residual_multiplier": metadata.number("residual_scale", float, 1.0),
        "logits_scaling": metadata.number("logit_scale", float, 1.0),
    }


def granite_factors(config: Any) -> dict[str, float]:
    """Return the factors of a Granite model by their names in a table."""
    return {
        "attention_scale": config.attention_multiplier,
        "embedding_factor": config.embedding_multiplier,
        "residual_factor": config.residual_multiplier,
        "logit_factor": 1 / config.logits_scaling,
    }


def _table(model: Any) -> ModelTable:
    return llama_table(model, **granite_factors(model.config))


GRANITE = Architecture(
    name="granite",
    classes=("GraniteForCausalLM",),
    table=_table,
    settings=granite_settings,
    are_halves_interleaved=True,
)
