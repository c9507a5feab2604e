"""One forward for the Llama family with weights in few bits: Llama, Mistral, Qwen2, Qwen3, SmolLM3.

Every product is of `forerun.backends.bits`, attention is that of `forerun.backends.blocks`, and what is between them
works on each row by itself. So a token's logits have the same bits whether it is run alone, after others, in a tree or
in a batch.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.backends.bits import ConcatLinear, Dense, LinearSlice, Packed, joined
from forerun.backends.blocks import BlockBatch, attend, lay_out_blocks
from forerun.backends.exact import (
    ROWS,
    attention_is_invariant,
    fixed_where_cheap,
    is_invariant,
    product_is_invariant,
    remembered,
)
from forerun.backends.scores import Scores
from forerun.backends.stored import StoredLinear
from forerun.backends.tiles import Tiles
from forerun.engine.target import Capture
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache, KVLayer

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM")
_ROPE = ("default", "linear", "llama3", "yarn")  # whose frequencies do not depend on how long a text is


def is_family(model: PreTrainedModel) -> bool:
    """Whether a model has stored weights (`forerun.backends.stored`), an architecture of the family, and no settings
    that `FamilyForward` does not know."""
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if type(model).__name__ not in FAMILY or not type(model).__module__.startswith("transformers.models."):
        return False
    if config.hidden_act != "silu" or rope not in _ROPE or getattr(config, "mlp_bias", False):
        return False
    linears = [model.lm_head, *(layer for each in model.model.layers for layer in _linears(each))]
    if not all(isinstance(each, StoredLinear) for each in linears):
        return False
    if not isinstance(model.lm_head.stored, Scores) or model.lm_head.bias is not None:
        return False
    return all(layer.self_attn.o_proj.bias is None for layer in model.model.layers)


def head_size(config: PreTrainedConfig) -> int:
    """Numbers of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class FamilyForward:
    """Logits from tokens. It takes the model's stored weights as they are, and leaves parts of joined ones in their
    place.

    Attributes:
        exact: "bitwise" where all kernels were found to give each row the same bits whatever stands beside it, else
            "rounding".
        dtype: of hidden states, keys and values.
    """

    dtype, pads = torch.bfloat16, True

    def __init__(self, model: PreTrainedModel) -> None:
        config, base = model.config, model.model
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size = head_size(config)
        self.eps, width = config.rms_norm_eps, config.hidden_size
        self.floor, self.floor_each = (torch.tensor((each * self.eps) ** 0.5) for each in (width, self.size))
        self.embed, self.head = base.embed_tokens, model.lm_head.stored
        self.rotary, self.tables = base.rotary_emb, (torch.empty(0, self.size),) * 2
        self.norm = _gain(base.norm)
        self.layers = [Layer(layer) for layer in base.layers]
        kinds = getattr(config, "layer_types", None) or []
        window = getattr(config, "sliding_window", None)
        slide = [kind == "sliding_attention" for kind in kinds] or [window is not None] * len(self.layers)
        for layer, sliding in zip(self.layers, slide, strict=True):
            layer.sliding = sliding
        self.sliding = {kind: window if kind else None for kind in sorted(set(slide))}
        with torch.inference_mode():
            exact = self._between(width, config.intermediate_size) and self._products()
        self._exact, self._threads = exact, torch.get_num_threads()

    @property
    def exact(self) -> Literal["bitwise", "rounding"]:
        """As it was found with the number of threads that there was then; with another, nobody has tried."""
        return "bitwise" if self._exact and torch.get_num_threads() == self._threads else "rounding"

    def _between(self, width: int, inner: int) -> bool:
        """Whether what stands between the products gives each row the same bits, found out by trying."""
        shape = self.heads, self.groups, self.size

        def tried() -> bool:
            maker = torch.Generator().manual_seed(0)
            count = self.heads + 2 * self.groups
            x, up, parts = (torch.randn(ROWS, size, generator=maker) for size in (width, 2 * inner, count * self.size))
            gain = torch.rand(self.heads + self.groups, self.size, generator=maker)
            places = torch.arange(count)[None, :, None]

            def each(rows: Tensor) -> Tensor:
                own = self.normed_each(rows.view(1, len(rows), count, self.size), gain)
                return self.turned(own, places * own, own).flatten(2)[0]

            trials = [(lambda rows: self.normed(rows, self.norm), x), (gated, up.bfloat16()), (each, parts.bfloat16())]
            return all(is_invariant(function, rows) for function, rows in trials)

        found = remembered("attention {}x{}x{}".format(*shape), lambda: attention_is_invariant(*shape))
        return found and remembered("{}x{}x{} of {}, {}".format(*shape, width, inner), tried)

    def _products(self) -> bool:
        """Likewise for the products. Those that need it, and that this costs little, are run with a fixed number of
        rows from then on."""
        found = True
        for place, name in [(self, "head"), *((layer, name) for layer in self.layers for name in PRODUCTS)]:
            product = getattr(place, name)
            if not product_is_invariant(product):
                fixed = fixed_where_cheap(product)
                found &= fixed is not None
                setattr(place, name, fixed or product)
        return found

    def __call__(
        self, inputs: Inputs, cache: KVCache, logits: bool, capture: Capture
    ) -> tuple[Tensor | None, Tensor | None]:
        """As `forerun.model.forward.Forward` says; logits in float32, hidden states in bfloat16."""
        batch = lay_out_blocks(inputs, cache, self.heads // self.groups, self.sliding)
        rows, new = batch.positions.shape

        def own(x: Tensor) -> Tensor:
            return inputs.unpad(x.view(rows, new, -1))

        x = self.embed(batch.ids.reshape(-1)).float()
        turn, last = self.turning(batch.positions), self.layers[-1]
        hidden: Tensor | None = None
        for layer, stored in zip(self.layers, cache.layers, strict=True):
            if capture == "below" and layer is last:
                hidden = own(x).bfloat16()
            parts = layer.qkv(self.normed(x, layer.first))
            if layer.bias is not None:
                parts = (parts + layer.bias).bfloat16()
            parts = parts.view(rows, new, -1, self.size)
            x = x + layer.out(self.attended(layer, parts, turn, batch, stored))
            x += layer.down(gated(layer.up(self.normed(x, layer.second))))
        if logits or capture == "head":
            x = self.scaled(own(x), self.norm)
        if capture == "head":
            hidden = x.bfloat16()
        return self.head(x) if logits else None, hidden

    def normed(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMSNorm of [n, d], in bfloat16."""
        return self.scaled(x, gain).bfloat16()

    def scaled(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMSNorm of [n, d], in float32. It is x / sqrt(|x|^2 + d eps) times a gain that holds the root of d."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(size, self.floor)).mul_(gain)

    def normed_each(self, parts: Tensor, gain: Tensor) -> Tensor:
        """The same of each query and key among [B, N, H + 2 G, D]; values stay what they are."""
        x = parts.narrow(2, 0, len(gain)).float()
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        normed = (x / torch.hypot(size, self.floor_each)).mul_(gain).bfloat16()
        return torch.cat((normed, parts.narrow(2, len(gain), self.groups)), 2)

    def rotations(self, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [.., D] of at least the first `end` positions. The sines of the first half are negative, so
        that turning the halves around needs no negation of its own."""
        tables = self.tables
        if end > len(tables[0]):
            places = torch.arange(1 << max(end - 1, 255).bit_length(), dtype=torch.float32)
            angles = torch.outer(places, self.rotary.inv_freq.float()).repeat(1, 2)
            cosines, sines = (each * self.rotary.attention_scaling for each in (angles.cos(), angles.sin()))
            sines[:, : self.size // 2].neg_()
            tables = self.tables = cosines, sines
        return tables

    def turning(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, N, H + 2 G, D] of the rotation, under which values stay what they are."""
        tables = self.rotations(int(positions.max()) + 1)
        count = self.heads + self.groups
        cos, sin = (table[positions].bfloat16()[:, :, None].expand(-1, -1, count, -1) for table in tables)
        still = cos[:, :, : self.groups]
        return torch.cat((cos, torch.ones_like(still)), 2), torch.cat((sin, torch.zeros_like(still)), 2)

    def turned(self, parts: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries and keys rotated (RoPE), as `turning` says."""
        return torch.addcmul(parts * cos, parts.roll(self.size // 2, -1), sin)

    def attended(
        self, layer: Layer, parts: Tensor, turn: tuple[Tensor, Tensor], batch: BlockBatch, stored: KVLayer
    ) -> Tensor:
        """What attention gives [B N, H D] for queries, keys and values [B, N, H + 2 G, D]."""
        heads, groups, size = self.heads, self.groups, self.size
        if layer.each is not None:
            parts = self.normed_each(parts, layer.each)
        if layer.rotates:
            parts = self.turned(parts, *turn)
        own = parts.narrow(2, heads, 2 * groups)
        seen = stored.update_both(own)
        if not batch.rounds:
            return attend(parts, heads, *seen, batch.masks[layer.sliding])
        each, found = torch.arange(len(parts))[:, None], []
        for round in batch.rounds:
            stored.put_both(own[each, round.path], round.slots)
            asked = attend(parts[each, round.asked], heads, *seen, round.masks[layer.sliding])
            found.append(asked.view(len(parts), -1, heads * size))
        stored.update_both(own)  # where a commit looks for them
        assert batch.back is not None
        return torch.cat(found, 1)[each, batch.back].flatten(0, 1)


PRODUCTS = ("qkv", "out", "up", "down")  # of a layer


class Layer:
    """The weights of one decoder layer. Those that take the same input are joined."""

    sliding = False

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.first, self.second = (
            _gain(layer.input_layernorm),
            _gain(layer.post_attention_layernorm),
        )
        self.qkv, self.bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.up, _ = _joined(mlp.gate_proj, mlp.up_proj)
        self.out, self.down = attention.o_proj.stored, mlp.down_proj.stored
        self.each: Tensor | None = None  # [H + G, D] gains of the norms of queries and keys
        if getattr(attention, "q_norm", None) is not None:
            sizes = attention.q_proj.out_features, attention.k_proj.out_features
            gains = [_gain(attention.q_norm), _gain(attention.k_norm)]
            self.each = torch.cat([gain.expand(size // len(gain), -1) for gain, size in zip(gains, sizes, strict=True)])
        self.rotates = bool(getattr(attention, "use_rope", True))


def gated(x: Tensor) -> Tensor:
    """silu(gate) * up [n, I] of both in one [n, 2 I]."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def _gain(norm: Any) -> Tensor:
    gain = norm.weight.detach().float()
    return gain * len(gain) ** 0.5


def _joined(*linears: StoredLinear) -> tuple[Packed | Tiles | Dense | ConcatLinear, Tensor | None]:
    """Their product, and their biases. They keep parts of it."""
    product = joined([linear.stored for linear in linears if not isinstance(linear.stored, Scores)])
    start = 0
    for linear in linears:
        if not isinstance(product, ConcatLinear):
            linear.stored = LinearSlice(product, start, linear.out_features)
        start += linear.out_features
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return product, torch.cat(biases).float() if biases else None
