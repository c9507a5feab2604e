"""Tiny random models of the Llama family, stored in few bits."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5}
_WINDOWS |= {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 20, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 4}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]} | _WINDOWS),
}


def tiny(name: str, seed: int = 0, **others: Any) -> PreTrainedModel:
    """A random float32 model whose logits differ enough for argmax to matter."""
    family, settings = MODELS[name]
    cls = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(seed)
    model: Any = cls(cls.config_class(**{**SIZES, **settings, **others}))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
        else:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
