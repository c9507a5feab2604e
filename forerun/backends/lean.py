"""A Llama forward in a few plain operations a layer.

Small models spend most of their time between operations: in module calls, argument checks and mask making. This is the
same arithmetic without them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from forerun.backends.packed import Product, product
from forerun.engine.target import Capture
from forerun.model.batch import Inputs, PaddedBatch, causal, pad
from forerun.model.kv_cache import KVCache

# Bigger models spend their time in the products, and copies of their weights would cost more than they bring.
LARGEST = 200_000_000
# Where queries that share keys are laid side by side, as attention there takes a mask or groups, not both.
FOLDING = ("cuda",)
LayerWeights = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_KNOWN = {nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU}
_HOMES = {LlamaForCausalLM.__module__, "transformers.activations"}


def lean_forward(model: PreTrainedModel) -> LeanForward | None:
    """The lean forward of a Llama; None for other models, other layers, and over LARGEST parameters.

    On a CPU it keeps copies of the weights, fused and laid out for few rows; on a GPU the model's own become views of
    the fused ones. Do not train or move the model afterwards.
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
    return LeanForward(model)


class LeanForward:
    """A `forerun.model.forward.Forward` of a plain Llama (`lean_forward`)."""

    exact: Literal["rounding"] = "rounding"
    pads = True

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        config, base = model.config, model.model
        weights = [
            (
                layer.input_layernorm.weight,
                _together(attention.q_proj, attention.k_proj, attention.v_proj),
                attention.o_proj.weight,
                layer.post_attention_layernorm.weight,
                _together(layer.mlp.gate_proj, layer.mlp.up_proj),
                layer.mlp.down_proj.weight,
            )
            for layer in base.layers
            for attention in [layer.self_attn]
        ]
        self.layers = LeanLayers(
            weights,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.rms_norm_eps,
            base.rotary_emb.inv_freq,
            config.max_position_embeddings,
        )
        self.dtype, self.device, self.embed = model.dtype, model.device, base.embed_tokens
        self.normed, self.head, self.gain = self.layers.norm_and_product(base.norm.weight, model.lm_head.weight)

    def __call__(
        self, inputs: Inputs, cache: KVCache, logits: bool, capture: Capture
    ) -> tuple[Tensor | None, Tensor | None]:
        batch = pad(inputs, cache, self.device, self.dtype)
        assert batch.ids is not None
        x = functional.embedding(batch.ids.reshape(-1), self.embed.weight)
        x = self.layers(x, batch, cache)

        def own(x: Tensor) -> Tensor:
            return inputs.unpad(x.view(*batch.positions.shape, -1))

        if not logits and not capture:
            return None, None
        x = self.normed(own(x))
        hidden = None if not capture else x if self.gain is None else x * self.gain
        return self.head(x) if logits else None, hidden


def rotations(frequencies: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [context, D] of the rotation, by position. The sines of the first half are negative, so that
    turning the halves around needs no negation of its own."""
    places = torch.arange(context, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(places, frequencies.float()).repeat(1, 2)
    cosines, sines = angles.cos(), angles.sin()
    sines[:, : len(frequencies)].neg_()
    return cosines, sines


def _together(*linears: nn.Linear) -> Tensor:
    """Their weights in one, and on a GPU theirs are views of it, as there would be no room for two of a big model."""
    whole = torch.cat([each.weight for each in linears])
    if whole.device.type != "cpu":
        for each, part in zip(linears, whole.split([len(each.weight) for each in linears]), strict=True):
            each.weight.data = part
    return whole


class LeanLayers:
    """Llama's decoder layers in a few plain operations each. In float32 on a CPU it keeps copies of the weights."""

    def __init__(
        self,
        weights: Sequence[LayerWeights],
        heads: int,
        groups: int,
        eps: float,
        frequencies: Tensor,
        context: int,
        few: bool = False,
    ) -> None:
        """`weights`: of each layer the first norm's gain [d], queries, keys and values [(H + 2 G) D, d], the way out
        [d, H D], the second norm's gain, gate and up [2 I, d], down [d, I]. `frequencies` [D / 2] of the rotation.
        `few`: see `product`."""
        self.heads, self.groups, self.size, self.context = heads, groups, 2 * len(frequencies), context
        first = weights[0][0]
        self.width, self.dtype, device = len(first), first.dtype, first.device
        self.eps, self.folds = eps, device.type in FOLDING
        self.product = functools.partial(product, one_row=True, few=few)
        # RMSNorm is x / sqrt(|x|^2 + width * eps) but for factors that the next weight can carry: three small
        # operations.
        self.floor = torch.tensor((self.width * eps) ** 0.5, device=device)
        self.cosines, self.sines = (table.to(self.dtype) for table in rotations(frequencies.to(device), context))
        self.layers = []
        for norm, qkv, out, second, up, down in weights:
            attention, mlp = self.norm_and_product(norm, qkv)[:2], self.norm_and_product(second, up)[:2]
            self.layers.append((*attention, self.product(out), *mlp, self.product(down)))

    def normed(self, x: Tensor) -> Tensor:
        """RMSNorm without its gain and a factor of sqrt(d)."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(size, self.floor)).to(self.dtype)

    def norm_and_product(self, gain: Tensor, weight: Tensor) -> tuple[Product, Product, Tensor | None]:
        """An RMSNorm with this gain and the product with a weight after it, and what is missing in between: a factor
        that the weight carries. In 16 bits, where it would round the weight, and on a GPU, where that would be a copy,
        nothing is."""
        if self.dtype != torch.float32 or weight.device.type != "cpu":
            return lambda x: functional.rms_norm(x, (self.width,), gain, self.eps), self.product(weight), None
        factor = gain.float() * self.width**0.5
        return self.normed, self.product(weight.float() * factor), factor

    def __call__(self, x: Tensor, batch: PaddedBatch, cache: KVCache) -> Tensor:
        """Return states [B N, d] after the layers from those before."""
        positions, mask = batch.positions, batch.mask
        rows, new = positions.shape
        heads, groups, size = self.heads, self.groups, self.size
        assert not isinstance(mask, dict)
        if mask is None and new > 1:
            mask = causal(new, batch.end, self.dtype, x.device)
        folded = self.folds and heads != groups and mask is not None
        if folded:
            assert mask is not None
            mask = mask.repeat(*[1] * (mask.ndim - 2), heads // groups, 1)
        cos, sin = self.cosines[positions][:, None], self.sines[positions][:, None]
        for (norm, qkv, out, second, gate_up, down), stored in zip(self.layers, cache.layers, strict=True):
            parts = qkv(norm(x)).view(rows, new, heads + 2 * groups, size).transpose(1, 2)
            turned = parts[:, : heads + groups]  # queries and keys at once
            turned = turned * cos + turned.roll(size // 2, -1) * sin
            keys, values = stored.update(turned[:, heads:], parts[:, heads + groups :])
            asked = turned[:, :heads]
            if folded:
                asked = asked.reshape(rows, groups, -1, size)
            attended = functional.scaled_dot_product_attention(
                asked, keys, values, attn_mask=mask, enable_gqa=heads != groups and not folded
            )
            if folded:
                attended = attended.reshape(rows, heads, new, size)
            x = x + out(attended.transpose(1, 2).reshape(rows * new, heads * size))
            gate, up = gate_up(second(x)).chunk(2, -1)
            x = x + down(functional.silu(gate) * up)
        return x
