"""A Llama forward in a few plain operations a layer.

A draft model is so small that most of its time is spent between operations: in module calls, argument checks and
mask making. This is the same arithmetic without them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from forerun.cache import KVCache
from forerun.model import LeanForward

# Bigger models spend their time in the products, and copies of their weights would cost more than they bring.
LARGEST = 200_000_000


def lean_forward(model: PreTrainedModel) -> LeanForward | None:
    """A function (ids [B, N], positions [B, N], cache, additive mask [B, 1, N, past + N] or None for causal, whether
    the last position's logits are enough) -> logits [B, N or 1, V].

    None for a model that is no plain Llama, has other layers in the place of nn.Linear (quantised, adapted), is spread
    over devices, or has over LARGEST parameters. Keeps fused copies of the query-key-value and gate-up weights: do not
    train or move the model afterwards.
    """
    config = model.config
    if model.num_parameters() > LARGEST or len({parameter.device for parameter in model.parameters()}) > 1:
        return None
    if type(model) is not LlamaForCausalLM or config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        return None
    if (config.rope_parameters or {}).get("rope_type", "default") != "default":
        return None
    products = [module for name, module in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    if any(type(module) is not nn.Linear for module in products):
        return None
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    eps, base = config.rms_norm_eps, model.model
    with torch.no_grad():
        angles = torch.outer(
            torch.arange(config.max_position_embeddings, dtype=torch.float32, device=model.device),
            base.rotary_emb.inv_freq.float(),
        ).repeat(1, 2)
        cosines, sines = angles.cos().to(model.dtype), angles.sin().to(model.dtype)
        sines[:, : size // 2].neg_()  # so that turning the halves around needs no negation of its own
        layers = [
            (
                layer.input_layernorm.weight,
                torch.cat([getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]),
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
                layer.mlp.down_proj.weight,
            )
            for layer in base.layers
        ]

    def forward(ids: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None, last_only: bool) -> Tensor:
        rows, new = ids.shape
        if mask is None and new > 1:
            past = cache.get_seq_length()
            mask = torch.ones(new, past + new, dtype=torch.bool, device=ids.device).tril_(past)
        x = functional.embedding(ids, base.embed_tokens.weight)
        cos, sin = cosines[positions][:, None], sines[positions][:, None]
        for number, (norm, qkv, out, norm_mlp, gate_up, down) in enumerate(layers):
            hidden = functional.linear(functional.rms_norm(x, norm.shape, norm, eps), qkv)
            parts = hidden.view(rows, new, heads + 2 * groups, size).transpose(1, 2)
            turned = parts[:, : heads + groups]  # queries and keys at once
            turned = turned * cos + turned.roll(size // 2, -1) * sin
            keys, values = cache.layers[number].update(turned[:, heads:], parts[:, heads + groups :])
            attended = functional.scaled_dot_product_attention(
                turned[:, :heads], keys, values, attn_mask=mask, enable_gqa=heads != groups
            )
            x = x + functional.linear(attended.transpose(1, 2).reshape(rows, new, heads * size), out)
            gate, up = functional.linear(functional.rms_norm(x, norm.shape, norm_mlp, eps), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        if last_only:  # a prompt needs no logits, and they would be the largest tensor of all
            x = x[:, -1:]
        x = functional.rms_norm(x, base.norm.weight.shape, base.norm.weight, eps)
        return functional.linear(x, model.lm_head.weight)

    return forward
