"""Heads over hidden states with a cache and rows of their own lengths, as decoding needs them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from forerun.cache import KVCache
from forerun.model import CausalLM, Rows
from forerun.nn.hidden import Block, HiddenDrafter, Layer
from forerun.runtime.lean import LayerWeights, LeanLayers
from forerun.runtime.packed import Product, product
from forerun.runtime.recorded import Recorded

LARGEST_TABLE = 2**26  # numbers


class HiddenLM(Rows):
    """A head of any kind, with the target's LM head at its hot set. Keeps copies of the weights: do not train the head
    afterwards.

    Attributes:
        kind: see `forerun.nn.hidden.KINDS`.
        width: of a state.
        hot: [S] the tokens that it answers for.
        logits: states [n, d] to logits [n, S], without token information.
        information: of tokens [..], T [.., S], for lyanna: a table's rows, or a product where that would be too large.
        states: how many places it looks ahead, for medusa.
        known: whether the features of a text are run with the tokens behind them.
        curves: of the calibration, see `HiddenConfig`.
        recorded: what runs states one by one instead, where the target's forwards are recorded as well.
    """

    recorded: Recorded | None = None

    @torch.no_grad()
    def __init__(self, head: HiddenDrafter, target: CausalLM) -> None:
        config = head.config
        self.kind, self.width, self.states = config.kind, config.hidden_size, config.states
        self.known = config.known or self.kind == "eagle"
        self.device, self.dtype = target.device, target.dtype
        self.hot = head.hot.to(self.device)
        self.curves = config.curves
        weight, bias = head_rows(target, self.hot, self.width)
        self.logits = product(weight, bias if bias.any() else None, one_row=True)
        if self.kind == "medusa":
            blocks = [block for block in head.blocks if isinstance(block, Block)]
            self.blocks = [
                tuple(product(linear.weight.to(self.dtype), one_row=True) for linear in (block.up, block.down))
                for block in blocks
            ]
            return
        self.embeddings = target.model.get_input_embeddings()
        fuse = head.fuse.weight.to(self.dtype)
        self.both = product(fuse, one_row=True)
        if self.kind == "lyanna":
            self.alone = product(fuse[:, : self.width].contiguous(), one_row=True)
            every = torch.arange(config.vocab_size, device=head.hot.device)
            if config.vocab_size * config.hot_size <= LARGEST_TABLE:
                table = head.token_information(every).to(self.dtype)
                self.information: Product = functools.partial(functional.embedding, weight=table)
            else:
                tokens, answer = head.token_states(every).to(self.dtype), product(head.answer.weight.to(self.dtype))
                self.information = lambda ids: answer(tokens[ids].flatten(0, -2)).view(*ids.shape, -1)
        layers = [layer for layer in head.layers if isinstance(layer, Layer)]
        weights: list[LayerWeights] = [
            (
                layer.before_attention.weight.to(self.dtype),
                layer.qkv.weight.to(self.dtype),
                layer.out.weight.to(self.dtype),
                layer.before_mlp.weight.to(self.dtype),
                layer.gate_up.weight.to(self.dtype),
                layer.down.weight.to(self.dtype),
            )
            for layer in layers
        ]
        self.layers = LeanLayers(
            weights,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.rms_norm_eps,
            layers[0].frequencies(self.device),
            config.max_position_embeddings,
        )
        self.gain = (head.norm.weight * config.hidden_size**0.5).to(self.dtype)
        if target.recorded is not None and self.kind == "lyanna":
            self.recorded = Recorded(self._step)

    def fresh(self) -> HiddenLM:
        """The same head with a cache of its own."""
        return copy.copy(self)

    def start(self, rows: int) -> None:
        """Forgets everything; there are this many rows."""
        self.cache = KVCache(0 if self.kind == "medusa" else len(self.layers.layers), rows)

    @torch.inference_mode()
    def extend(self, states: Sequence[Tensor], tokens: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Runs and keeps the next states [n_r, d] of each row, with the tokens behind them or without; the head's
        states [B, d] behind each row's last one, and something for rows that have none."""
        counts = [len(row) for row in states]
        new = max(counts)
        if len(states) == 1:
            x = states[0]
        else:
            x = torch.cat([functional.pad(row, (0, 0, 0, new - len(row))) for row in states])  # [B N, d]
        if tokens is None:
            x = self.alone(x)
        else:
            ids = torch.tensor([[*row, *[0] * (new - len(row))] for row in tokens], device=self.device)
            x = self._fused(x, ids.flatten())
        positions, mask = self._layout(counts, [range(count) for count in counts], None)
        x = self._run(x, positions, mask, self.cache)
        self.cache.commit([list(range(count)) for count in counts])
        if len(states) == 1:
            return x[-1:]
        return x[torch.tensor([row * new + max(count, 1) - 1 for row, count in enumerate(counts)], device=self.device)]

    @torch.inference_mode()
    def roll(self, states: Tensor, steps: int, rows: Collection[int]) -> list[Tensor]:
        """Runs and keeps, for these rows, states [B, d] without tokens behind them, then what comes of them, and so
        on: the `steps` states [B, d] that come. Other rows stay as they are, and what is said of them means nothing."""
        depths = [range(row in rows) for row in range(len(states))]
        found, paths = [], [list(own) for own in depths]
        for _ in range(steps):
            given, said = states[:, None], None
            if self.recorded is not None:
                said = self.recorded(given, depths, None, self.cache, False)
            if said is None:
                positions, mask = self._layout([len(own) for own in depths], depths, None)
                said = self._step(given, positions, self.cache, mask)
            states = said[0][:, 0]
            self.cache.commit(paths)
            found.append(states)
        return found

    def _step(
        self, states: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | dict[str, Tensor] | None, *_: bool
    ) -> tuple[Tensor, None]:
        """A lean forward (`forerun.model`) from states [B, 1, d] to the next ones."""
        x = self._run(self.alone(states.flatten(0, 1)), positions, mask, cache)
        return x.view(states.shape), None

    @torch.inference_mode()
    def branch(self, states: Tensor, tokens: Tensor, depth: int, seen: Tensor) -> Tensor:
        """Runs and keeps states [B, w, d] with the tokens [B, w] behind them, all `depth` places behind a text, as an
        eagle's beams do. `seen` [B, w, P + w] bool: which of the P that were kept last and of themselves each one
        sees. States [B, w, d] behind them."""
        rows, width = tokens.shape
        back = seen.shape[-1] - width
        positions, mask = self._layout([width] * rows, [[depth - back] * width] * rows, list(seen))
        x = self._run(self._fused(states.flatten(0, 1), tokens.flatten()), positions, mask, self.cache)
        self.cache.commit([list(range(width))] * rows)
        return x.view(rows, width, -1)

    def _fused(self, x: Tensor, ids: Tensor) -> Tensor:
        embedded = self.embeddings(ids).to(x.dtype)
        return self.both(torch.cat([x, functional.rms_norm(embedded, embedded.shape[-1:])], -1))

    def _run(self, x: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor] | None, cache: KVCache) -> Tensor:
        assert not isinstance(mask, dict)
        positions = positions.clamp(max=self.layers.context - 1)  # a row that drafts for longer neighbours
        return self.layers.normed(self.layers(x, positions, cache, mask)) * self.gain

    @torch.inference_mode()
    def ahead(self, states: Tensor, places: int) -> Tensor:
        """States [B, K, d] at so many places ahead of states [B, d], as medusa has them."""
        return torch.stack([states + down(functional.silu(up(states))) for up, down in self.blocks[:places]], 1)


@torch.no_grad()
def head_rows(target: CausalLM, tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Weight [S, d] and bias [S] of the LM head for these tokens, whatever form its weights have been given; it reads
    states of `size`."""
    head = target.head
    ones = torch.eye(size, dtype=target.dtype, device=target.device)
    bias = head(ones.new_zeros(1, size))[0, tokens]
    columns = [head(part)[:, tokens] - bias for part in ones.split(256)]
    return torch.cat(columns).T.contiguous(), bias
