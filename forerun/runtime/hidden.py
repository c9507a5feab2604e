"""Heads over hidden states with a cache and rows of their own lengths, as decoding needs them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from forerun.cache import KVCache
from forerun.model import CausalLM, Rows
from forerun.nn.hidden import HiddenDrafter, Layer
from forerun.runtime.lean import LayerWeights, LeanLayers
from forerun.runtime.packed import product


class HiddenLM(Rows):
    """The layers of a head of the kind lyanna, the target's LM head at its hot set, and the token information as a
    table. Keeps copies of the weights: do not train the head afterwards.

    Attributes:
        hot: [S] the tokens that it answers for, as a list.
        table: [V, S] token information.
    """

    def __init__(self, head: HiddenDrafter, target: CausalLM) -> None:
        self.device, self.dtype, config = target.device, target.dtype, head.config
        self.hot = head.hot.tolist()
        layers = [layer for layer in head.layers if isinstance(layer, Layer)]
        with torch.no_grad():
            weight, bias = head_rows(target, head.hot)
            self.logits = product(weight, bias, one_row=True)
            self.table = head.table().to(self.dtype)
            weights: list[LayerWeights] = [
                (
                    layer.before_attention.weight.to(self.dtype),
                    [layer.qkv.weight.to(self.dtype)],
                    layer.out.weight.to(self.dtype),
                    layer.before_mlp.weight.to(self.dtype),
                    [layer.gate_up.weight.to(self.dtype)],
                    layer.down.weight.to(self.dtype),
                )
                for layer in layers
            ]
            self.layers = LeanLayers(
                weights,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.rms_norm_eps,
                layers[0].angles,
                config.max_position_embeddings,
            )
            self.gain = (head.norm.weight * config.hidden_size**0.5).to(self.dtype)

    def fresh(self) -> HiddenLM:
        """The same head with a cache of its own."""
        return copy.copy(self)

    def start(self, rows: int) -> None:
        """Forgets everything; there are this many rows."""
        self.cache = KVCache(len(self.layers.layers), rows)

    @torch.inference_mode()
    def extend(self, states: Sequence[Tensor]) -> Tensor:
        """Runs and keeps the next states [n_r, d] of each row; the head's states [B, d] behind each row's last one,
        and something for rows that have none."""
        counts = [len(row) for row in states]
        new = max(counts)
        x = torch.stack([functional.pad(row, (0, 0, 0, new - len(row))) for row in states])  # [B, N, d]
        positions, mask = self._layout(counts, [range(count) for count in counts], None)
        assert not isinstance(mask, dict)
        positions = positions.clamp(max=self.layers.context - 1)  # a row that drafts for longer neighbours
        y = self.layers(x.flatten(0, 1), positions, self.cache, mask)
        self.cache.commit([list(range(count)) for count in counts])
        last = torch.tensor([row * new + max(count, 1) - 1 for row, count in enumerate(counts)], device=self.device)
        return self.layers.normed(y[last]) * self.gain


@torch.no_grad()
def head_rows(target: CausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [S, d] and bias [S] of the LM head for these tokens, whatever form its weights have been given."""
    head, size = target.head, target.config.hidden_size
    ones = torch.eye(size, dtype=target.dtype, device=target.device)
    bias = head(ones.new_zeros(1, size))[0, tokens]
    columns = [head(part)[:, tokens] - bias for part in ones.split(256)]
    return torch.cat(columns).T.contiguous(), bias
