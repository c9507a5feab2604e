"""Gemma 2: norms on both sides, and limits of scores and logits."""

from __future__ import annotations

from typing import Any

from forerun.backends.architectures.architecture import (
    Architecture,
    Settings,
    layer_tables,
    windowed_layer_types,
)
from forerun.backends.architectures.gemma3 import (
    GEMMA_TENSORS,
    gemma_layer,
    gemma_model,
    query_scalar,
)
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.table import ModelTable

_FULL_EVERY = 2
_LAYERS_OF_27B = 46
# All sizes have these numbers, so the first files did not say them.
_WINDOW = 4096
_SCORE_CAP = 50.0
_LOGIT_CAP = 30.0


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    layers = settings["num_hidden_layers"]
    return {
        "query_pre_attn_scalar": query_scalar(settings, _LAYERS_OF_27B),
        "sliding_window": metadata.number("attention.sliding_window", int, _WINDOW),
        "layer_types": windowed_layer_types(metadata, layers, _FULL_EVERY),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", float, _SCORE_CAP),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", float, _LOGIT_CAP),
    }


def _table(model: Any) -> ModelTable:
    activation = model.config.hidden_activation
    return gemma_model(model, layer_tables(model, gemma_layer, activation=activation))


GEMMA2 = Architecture(
    name="gemma2",
    classes=("Gemma2ForCausalLM",),
    table=_table,
    tensors=GEMMA_TENSORS,
    settings=_settings,
    norm_offset=1.0,
)
