"""Llama, and Mistral's models, whose files are called `llama` too."""

from __future__ import annotations

from forerun.backends.architectures.architecture import Architecture, Settings, llama_table
from forerun.backends.gguf.metadata import Metadata


def _settings(metadata: Metadata, settings: Settings) -> Settings:
    context = settings["max_position_embeddings"]
    window = metadata.number("attention.sliding_window", int, context)
    if window < context:  # only Mistral's models have one
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_up.bias"),
    }


LLAMA = Architecture(
    name="llama",
    classes=("LlamaForCausalLM", "MistralForCausalLM"),
    table=llama_table,
    settings=_settings,
    are_halves_interleaved=True,
)
