"""A Llama forward in a few plain operations a layer.

Small models spend most of their time between operations: in module calls, argument checks and mask making. This is the
same arithmetic without them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from forerun.cache import KVCache
from forerun.model import LeanForward
from forerun.runtime.packed import Product, product

# Bigger models spend their time in the products, and copies of their weights would cost more than they bring.
LARGEST = 200_000_000
_KNOWN = {nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU}
_HOMES = {LlamaForCausalLM.__module__, "transformers.activations"}


def lean_forward(model: PreTrainedModel) -> LeanForward | None:
    """A function (ids [B, N], positions [B, N], cache, additive mask [B, 1, N, past + N] or None for causal, whether
    the last position's logits are enough, whether the LM head's input is wanted) -> logits [B, N or 1, V] and that
    input [B, N or 1, d].

    None for a model that is no plain Llama, has layers of others, or has over LARGEST parameters. Keeps copies of the
    weights, fused, laid out for few rows and with the norms' gains in them: do not train or move the model afterwards.
    """
    config = model.config
    if model.num_parameters() > LARGEST:
        return None
    if type(model) is not LlamaForCausalLM or config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        return None
    if (config.rope_parameters or {}).get("rope_type", "default") != "default":
        return None
    if not all(type(module) in _KNOWN or type(module).__module__ in _HOMES for module in model.modules()):
        return None
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    base, vocabulary = model.model, config.vocab_size
    width, dtype = config.hidden_size, model.dtype
    # RMSNorm is x / sqrt(|x|^2 + width * eps) but for factors that the next weight can carry: three small operations.
    floor = torch.tensor((width * config.rms_norm_eps) ** 0.5, device=model.device)

    def normed(x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(size, floor)).to(dtype)

    def behind(norm: nn.Module, *linears: nn.Linear) -> Product:
        weight = torch.cat([linear.weight for linear in linears]).float()
        return product((weight * norm.get_parameter("weight").float() * width**0.5).to(dtype), one_row=True)

    with torch.no_grad():
        angles = torch.outer(
            torch.arange(config.max_position_embeddings, dtype=torch.float32, device=model.device),
            base.rotary_emb.inv_freq.float(),
        ).repeat(1, 2)
        cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
        sines[:, : size // 2].neg_()  # so that turning the halves around needs no negation of its own
        layers = [
            (
                behind(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj),
                product(attention.o_proj.weight, one_row=True),
                behind(layer.post_attention_layernorm, layer.mlp.gate_proj, layer.mlp.up_proj),
                product(layer.mlp.down_proj.weight, one_row=True),
            )
            for layer in base.layers
            for attention in [layer.self_attn]
        ]
        head = behind(base.norm, model.lm_head)
        gain = base.norm.weight * width**0.5

    def forward(
        ids: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None, last_only: bool, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows, new = ids.shape
        if mask is None and new > 1:
            past = cache.get_seq_length()
            # Added, not boolean: attention would turn that into this in every layer.
            mask = torch.full((new, past + new), -torch.inf, dtype=dtype, device=ids.device).triu_(past + 1)
        x = functional.embedding(ids.view(-1), base.embed_tokens.weight)  # [rows * new, width] from here on
        cos, sin = cosines[positions][:, None], sines[positions][:, None]
        for (qkv, out, gate_up, down), stored in zip(layers, cache.layers, strict=True):
            parts = qkv(normed(x)).view(rows, new, heads + 2 * groups, size).transpose(1, 2)
            turned = parts[:, : heads + groups]  # queries and keys at once
            turned = turned * cos + turned.roll(size // 2, -1) * sin
            keys, values = stored.update(turned[:, heads:], parts[:, heads + groups :])
            attended = functional.scaled_dot_product_attention(
                turned[:, :heads], keys, values, attn_mask=mask, enable_gqa=heads != groups
            )
            x = x + out(attended.transpose(1, 2).reshape(rows * new, heads * size))
            gate, up = gate_up(normed(x)).chunk(2, -1)
            x = x + down(functional.silu(gate) * up)
        if last_only:  # a prompt needs no logits, and they would be the largest tensor of all
            x = x.view(rows, new, width)[:, -1]
        x = normed(x)
        hidden = (x * gain).view(rows, -1, width) if wanted else None
        return head(x).view(rows, -1, vocabulary), hidden

    return forward
