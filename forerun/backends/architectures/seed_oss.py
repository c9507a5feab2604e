"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from forerun.backends.architectures.architecture import (
    LLAMA_TENSORS,
    Architecture,
    Settings,
    llama_table,
)
from forerun.backends.gguf.metadata import Metadata


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    return {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "attention_out_bias": metadata.has("blk.0.attn_output.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_up.bias"),
    }


SEED_OSS = Architecture(
    name="seed_oss",
    classes=("SeedOssForCausalLM",),
    table=llama_table,
    tensors=LLAMA_TENSORS | {"post_attention_layernorm": "post_attention_norm"},
    settings=_settings,
)
