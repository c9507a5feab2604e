"""The Llama family: the parts of transformers' models that `forerun.backends.quantised` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.backends.stored import StoredEmbedding, StoredLinear

FAMILY = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)
# Rotations whose frequencies do not depend on the length of a text.
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
_PLAIN_MODULES = {nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU}

Linear = nn.Linear | StoredLinear


class Norm(Protocol):
    """An RMS norm."""

    weight: Tensor


class Attention(Protocol):
    """The attention of a layer. Some classes also have `q_norm`, `k_norm` and `use_rope`."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear


class Mlp(Protocol):
    """The gated MLP of a layer."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


class DecoderLayer(Protocol):
    """A decoder layer."""

    self_attn: Attention
    mlp: Mlp
    input_layernorm: Norm
    post_attention_layernorm: Norm


class Rotary(Protocol):
    """The rotation of queries and keys."""

    inv_freq: Tensor
    attention_scaling: float


class Base(Protocol):
    """A model without its LM head."""

    embed_tokens: nn.Embedding | StoredEmbedding
    layers: Sequence[DecoderLayer]
    norm: Norm
    rotary_emb: Rotary


class FamilyModel(Protocol):
    """A model of the family."""

    config: Any
    model: Base
    lm_head: Linear


def family_model(model: PreTrainedModel) -> FamilyModel | None:
    """Return a model of the family that our forward can compute, or None for another model."""
    kind = type(model)
    if kind.__name__ not in FAMILY or not kind.__module__.startswith("transformers.models."):
        return None
    member = cast(FamilyModel, model)
    return member if _has_our_settings(member.config) and _has_our_shapes(member) else None


def _has_our_settings(config: Any) -> bool:
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotation not in _FIXED_ROTATIONS or getattr(config, "mlp_bias", False):
        return False
    return bool(config.hidden_act == "silu")


def _has_our_shapes(model: FamilyModel) -> bool:
    """Return whether biases stand where C expects them, and its vectors divide the sizes."""
    if model.lm_head.bias is not None:
        return False
    if any(layer.self_attn.o_proj.bias is not None for layer in model.model.layers):
        return False
    config = model.config
    sizes = config.hidden_size, config.intermediate_size, head_size(config)
    return all(size % 8 == 0 for size in sizes) and rotary_dims(model) % 16 == 0


def linears(model: FamilyModel) -> list[Linear]:
    """Return all linear layers, the LM head first."""
    layers = [model.lm_head]
    for layer in model.model.layers:
        attention = layer.self_attn
        mlp = layer.mlp
        layers += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        layers += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return layers


def windows(model: FamilyModel) -> list[int]:
    """Return how many of the last positions each layer sees; 0 for all."""
    layers = len(model.model.layers)
    window = getattr(model.config, "sliding_window", None) or 0
    kinds = getattr(model.config, "layer_types", None)
    if not kinds:
        return [window] * layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds[:layers]]


def rotary_dims(model: FamilyModel) -> int:
    """Return how many numbers of a head are rotated."""
    return 2 * len(model.model.rotary_emb.inv_freq)


def head_size(config: PreTrainedConfig) -> int:
    """Return the size of an attention head."""
    named = getattr(config, "head_dim", None)
    return int(named or config.hidden_size // config.num_attention_heads)


def is_plain(model: PreTrainedModel) -> bool:
    """Return whether all modules are those of the architecture, with float32 weights on a CPU."""
    homes = type(model).__module__, "transformers.activations"
    if not all(
        type(module) in _PLAIN_MODULES or type(module).__module__ in homes
        for module in model.modules()
    ):
        return False
    return all(
        parameter.dtype == torch.float32 and parameter.device.type == "cpu"
        for parameter in model.parameters()
    )
