"""Ministral 3: Mistral, whose queries grow slowly with their position."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    Architecture,
    Settings,
    llama_table,
    rotation_of,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import ModelTable


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    rope = dict(settings["rope_parameters"])
    rope.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
    rope["llama_4_scaling_beta"] = metadata.value("attention.temperature_scale", float, 0.0)
    return {"rope_parameters": rope}


def _table(model: Any) -> ModelTable:
    rope = model.config.rope_parameters
    rotation = rotation_of(
        model.model.rotary_emb,
        query_growth=rope.get("llama_4_scaling_beta") or 0.0,
        query_step=rope.get("original_max_position_embeddings") or 1,
    )
    return llama_table(model, rotations=[rotation])


MISTRAL3 = Architecture(
    name="mistral3",
    classes=("Ministral3ForCausalLM",),
    table=_table,
    settings=_settings,
    are_halves_interleaved=True,
)
