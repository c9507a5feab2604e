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
from forerun.runtime.lean import LeanLayers
from forerun.runtime.packed import product


class HiddenLM(Rows):
    """The layers of a head of the kinds lyanna and eagle, the target's LM head at its hot set, and the token
    information as a table. Keeps copies of the weights: do not train the head afterwards.

    Attributes:
        hot: [S] the tokens that it answers for, as a list.
        table: [V, S] token information, None for other kinds.
    """

    def __init__(self, head: HiddenDrafter, target: CausalLM) -> None:
        self.kind, self.device, config = head.config.kind, target.device, head.config
        self.dtype = target.dtype
        self.hot = head.hot.tolist()
        self.states = config.states
        with torch.no_grad():
            weight, bias = head_rows(target, head.hot)
            self.logits = product(weight, bias, one_row=True)
            self.table = head.table().to(self.dtype) if self.kind == "lyanna" else None
            if self.kind == "medusa":
                blocks = torch.cat([block.get_parameter("weight") for block in head.blocks])
                self.blocks = product(blocks.to(self.dtype), one_row=True)
                return
            layers = [layer for layer in head.layers if isinstance(layer, Layer)]
            weights = [
                (
                    layer.before_attention.weight,
                    layer.qkv.weight,
                    layer.out.weight,
                    layer.before_mlp.weight,
                    layer.gate_up.weight,
                    layer.down.weight,
                )
                for layer in layers
            ]
            self.layers = LeanLayers(
                [tuple(weight.to(self.dtype) for weight in each) for each in weights],
                config.num_attention_heads,
                config.num_key_value_heads,
                config.rms_norm_eps,
                layers[0].angles,
                config.max_position_embeddings,
            )
            self.gain = (head.norm.weight * config.hidden_size**0.5).to(self.dtype)
            if self.kind == "eagle":
                self.fuse = product(head.fuse.weight.to(self.dtype), one_row=True)
                self.embeddings: Tensor = target.model.get_input_embeddings().get_parameter("weight").detach()

    def fresh(self) -> HiddenLM:
        """The same head with a cache of its own."""
        return copy.copy(self)

    def start(self, rows: int) -> None:
        """Forgets everything; there are this many rows."""
        self.cache = KVCache(len(self.layers.layers), rows)

    @torch.inference_mode()
    def extend(self, states: Sequence[Tensor], tokens: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Runs and keeps the next states [n_r, d] of each row, for eagle with the tokens behind them; the head's states
        [B, d] behind each row's last one, zeros for rows that have none."""
        counts = [len(row) for row in states]
        new = max(counts)
        x = torch.stack([functional.pad(row, (0, 0, 0, new - len(row))) for row in states])  # [B, N, d]
        if tokens is not None:
            ids = torch.tensor([[*row, *[0] * (new - len(row))] for row in tokens], device=self.device)
            x = torch.cat([x, self.embeddings[ids]], -1)
        positions, mask = self._layout(counts, [range(count) for count in counts], None)
        assert not isinstance(mask, dict)
        positions = positions.clamp(max=self.layers.context - 1)  # a row that drafts for longer neighbours
        flat = x.flatten(0, 1)
        y = self.layers(self.fuse(flat) if tokens is not None else flat, positions, self.cache, mask)
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
