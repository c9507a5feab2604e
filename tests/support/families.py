"""Tiny random models that run in C, with float32 weights or stored in few bits."""

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
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROWING: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_GROWING |= {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 20, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_key_value_heads": 4}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]} | _WINDOWS),
    "gemma2": (
        "Gemma2",
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0} | _WINDOWS,
    ),
    "gemma3": ("Gemma3", _WINDOWS),
    "phi3": ("Phi3", {"hidden_size": 128, "sliding_window": 7}),
    "granite": ("Granite", {"residual_multiplier": 0.5, "logits_scaling": 3.0}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", _WINDOWS),
    "glm4": ("Glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "exaone4": ("Exaone4", _WINDOWS),
    "cohere2": ("Cohere2", _WINDOWS),
    "starcoder2": ("Starcoder2", {"use_bias": True, "sliding_window": 9}),
    "ministral3": ("Ministral3", {"rope_parameters": _GROWING}),
    "qwen3_moe": ("Qwen3Moe", _EXPERTS | {"norm_topk_prob": True, "num_key_value_heads": 4}),
    "qwen2_moe": ("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "gpt_oss": ("GptOss", {"num_local_experts": 5, "num_experts_per_tok": 2} | _WINDOWS),
    "hunyuan": ("HunYuanDenseV1", {}),
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
