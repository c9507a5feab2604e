"""ERNIE 4.5's dense models: Llama that rotates neighbours."""

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
    return {"use_bias": metadata.has("blk.0.attn_q.bias")}


def _table(model: Any) -> ModelTable:
    rotation = rotation_of(model.model.rotary_emb, is_interleaved=True)
    return llama_table(model, rotations=[rotation])


ERNIE4_5 = Architecture(
    name="ernie4_5",
    classes=("Ernie4_5ForCausalLM",),
    table=_table,
    settings=_settings,
)
