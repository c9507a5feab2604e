"""Heads over hidden states with a cache, one row a sequence, as decoding needs them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.backends.information import NativeInformation, token_information
from forerun.backends.lean import LeanLayers
from forerun.backends.native_heads import Guess, HeadChain, NativeHead, head_chain, native_head
from forerun.backends.packed import Product, product
from forerun.backends.scores import draft_head
from forerun.engine.target import Capture
from forerun.heads.heads import HeadLayer, HiddenDrafter
from forerun.model.batch import Inputs, pad
from forerun.model.causal_lm import CausalLM
from forerun.model.kv_cache import KVCache
from forerun.model.rows import Rows


class HiddenLM(Rows):
    """A head of any kind, with the target's LM head for its hot set. It keeps copies of the weights: do not train the
    head afterwards. On a CPU they are in 8 bits unless `few` is False, as a draft may round.

    Attributes:
        kind: see `forerun.heads.heads.KINDS`.
        width: size of a state.
        hot: [S] the tokens that it gives logits of.
        logits: of states [n, d], logits [n, S] without token information.
        information: of tokens [..], T [.., S] (lyanna). None for a head without it.
        known: whether features are run with the tokens behind them.
        feature: which states of the target it takes as features, see `HiddenConfig`.
        curves: calibration, see `HiddenConfig`.
        native: runs the layers instead, where C can.
        chain: drafts a whole chain for one sequence instead, where C can (`guess`).
    """

    native: NativeHead | None = None
    chain: HeadChain | None = None
    information: Product | None = None

    @torch.no_grad()
    def __init__(self, head: HiddenDrafter, target: CausalLM, few: bool = True) -> None:
        config = head.config
        self.kind, self.width = config.kind, config.hidden_size
        self.known = config.known or self.kind == "eagle"
        self.feature: Capture = "below" if config.feature == "below" else "head"
        few = few and target.device.type == "cpu"
        self.device, self.dtype = target.device, torch.float32 if few else target.dtype
        multiply = functools.partial(product, one_row=True, few=few)
        self.hot, self.vocab_size = head.hot.to(self.device), target.vocab_size
        self.curves = config.curves
        weight, bias = head_rows(target, self.hot, self.width, self.dtype)
        self.logits: Product = draft_head(weight, bias if bias.any() else None, few)
        self._enter = (head.enter.weight.float().clone(), config.rms_norm_eps) if self.feature == "below" else None
        self._depth = config.num_hidden_layers
        self._empty()
        self.embeddings = target.model.get_input_embeddings()
        self.information = token_information(head, self.dtype, few)
        self.native = native_head(head) if few else None
        if self.native is not None:
            known = self.information
            if known is None or isinstance(known, NativeInformation):
                is_eagle = self.kind == "eagle"
                self.chain = head_chain(self.native, self.logits, self.hot, known, self.embeddings, is_eagle)
            return
        fuse = head.fuse.weight.to(self.dtype)
        self.both = multiply(fuse)
        if self.kind == "lyanna":
            self.alone = multiply(fuse[:, : self.width].contiguous())
            self.between: Product = self.alone if config.fusion == "every" else lambda states: states
        layers = [layer for layer in head.layers if isinstance(layer, HeadLayer)]
        names = "before_attention", "qkv", "out", "before_mlp", "gate_up", "down"
        weights: list[Any] = [tuple(getattr(layer, name).weight.to(self.dtype) for name in names) for layer in layers]
        self.layers = LeanLayers(
            weights,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.rms_norm_eps,
            layers[0].frequencies(self.device),
            config.max_position_embeddings,
            few,
        )
        self.gain = (head.norm.weight * config.hidden_size**0.5).to(self.dtype)

    def _empty(self) -> None:
        self.cache, self._prompt = KVCache(self._depth), KVCache(self._depth)

    def fresh(self) -> HiddenLM:
        """The same head with a cache of its own."""
        other = copy.copy(self)
        other._empty()
        if self.chain is not None:
            other.chain = self.chain.fresh()
        return other

    @torch.inference_mode()
    def prefill(
        self, id: int, features: Tensor, tokens: Sequence[int] | None, chunk: int, reserve: int = 0
    ) -> Iterator[int]:
        """Adds a sequence with features [n, d] and the tokens behind them, or without tokens. They run in a cache of
        one row; after each chunk of at most `chunk` yields how many those were."""
        prompt, count = self._prompt, len(features)
        prompt.reset()
        prompt.add(0, count)
        for start in range(0, count, chunk):
            part = self._entered(features[start : start + chunk])
            behind = None if tokens is None else [tokens[start : start + chunk]]
            self._extend(prompt, [0], [part], behind)
            yield len(part)
        self.add(id, max(reserve, count))
        if count:
            self.cache.copy_in(id, prompt.view(0, count), count)

    @torch.inference_mode()
    def extend(
        self, ids: Sequence[int], states: Sequence[Tensor], tokens: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Runs and keeps the next features [n_r, d] of each sequence, at least one, with the tokens behind them or
        without. Returns the head's states [R, d] behind each sequence's last one."""
        return self._extend(self.cache, ids, [self._entered(own) for own in states], tokens)

    def guesses(self, id: int, count: int, most: int) -> bool:
        """Whether `guess` can draft `most` tokens behind so many features of a sequence."""
        return self.chain is not None and self.chain.fits(self.length(id), count, most)

    @torch.inference_mode()
    def guess(
        self,
        id: int,
        features: Tensor,
        tokens: Sequence[int] | None,
        root: int,
        most: int,
        start: int = 0,
        old: Tensor | None = None,
        weight: float = 0.0,
    ) -> Guess:
        """A chain of argmax tokens behind `root`. Runs and keeps the next features [n, d] of the sequence with the
        tokens behind them, or without; what is drafted is not kept.

        With a `start` it goes on with the draft of that length that the last call made of the same features. `old`
        [m, S]: logits of the first places that are added with `weight`.
        """
        assert self.chain is not None
        return self.chain(self.cache, id, self._entered(features), tokens, root, most, start, old, weight)

    def _entered(self, features: Tensor) -> Tensor:
        if self._enter is None:
            return features.to(self.dtype)
        gain, eps = self._enter
        return functional.rms_norm(features.float(), (self.width,), gain, eps).to(self.dtype)

    def _extend(
        self, cache: KVCache, ids: Sequence[int], states: Sequence[Tensor], tokens: Sequence[Sequence[int]] | None
    ) -> Tensor:
        counts = [len(own) for own in states]
        x = states[0] if len(states) == 1 else torch.cat(list(states))
        if tokens is not None:
            x = self._beside(x, torch.tensor([token for own in tokens for token in own], device=self.device))
        if self.native is not None:
            return self.native.extend(cache, ids, x, counts)
        x, depths = self.alone(x) if tokens is None else self.both(x), [range(count) for count in counts]
        inputs = Inputs([cache.row(id) for id in ids], depths, given=x)
        x = self._run(inputs, cache)
        cache.commit(ids, depths)
        return inputs.last(x)

    @torch.inference_mode()
    def roll(self, ids: Sequence[int], states: Tensor, steps: int) -> list[Tensor]:
        """Runs and keeps states [R, d] without tokens behind them, then the states that come of them, and so on: the
        `steps` states [R, d] that come."""
        if steps < 1:
            return []
        if self.native is not None:
            return self.native.roll(self.cache, ids, states, steps)
        one, found = [range(1)] * len(ids), []
        for _ in range(steps):
            states = self._run(self._inputs(ids, one, given=self.between(states)), self.cache)
            self.cache.commit(ids, one)
            found.append(states)
        return found

    @torch.inference_mode()
    def branch(self, ids: Sequence[int], states: Tensor, tokens: Tensor, depth: int, seen: Tensor) -> Tensor:
        """Runs and keeps states [R, w, d] with the tokens [R, w] behind them, all of them `depth` places behind each
        sequence's text. `seen` [R, w, P + w] bool: which of the P states that were kept last, and of themselves, each
        one sees. Returns the states [R, w, d] behind them."""
        if self.native is not None:
            x = self._beside(states.flatten(0, 1), tokens.flatten())
            return self.native.branch(self.cache, ids, x, depth, seen).view(states.shape)
        width = tokens.shape[1]
        depths = [[depth - (seen.shape[-1] - width)] * width] * len(ids)
        x = self.both(self._beside(states.flatten(0, 1), tokens.flatten()))
        x = self._run(self._inputs(ids, depths, list(seen), given=x), self.cache)
        self.cache.commit(ids, [range(width)] * len(ids))
        return x.view(states.shape)

    def _beside(self, x: Tensor, tokens: Tensor) -> Tensor:
        """States [n, d] with the embeddings of tokens [n]: what the first matrix takes [n, 2 d]."""
        embedded = self.embeddings(tokens).to(x.dtype)
        return torch.cat([x, functional.rms_norm(embedded, embedded.shape[-1:])], -1)

    def _run(self, inputs: Inputs, cache: KVCache) -> Tensor:
        """States [n, d] after inputs that have gone through the first matrix."""
        batch = pad(inputs, cache, self.device, self.dtype)
        # Beyond its context stands a row that drafts as deep as its neighbours, for nothing.
        batch = replace(batch, positions=batch.positions.clamp(max=self.layers.context - 1))
        assert batch.states is not None
        x = self.layers(batch.states.flatten(0, 1), batch, cache)
        return self.layers.normed(inputs.unpad(x.view(batch.states.shape))) * self.gain


@torch.no_grad()
def head_rows(target: CausalLM, tokens: Tensor, size: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Weight [S, d] and bias [S] of the LM head for these tokens, whatever form its weights are stored in. `size` is
    that of the states it reads, `dtype` theirs if it is not the target's."""
    head, kept = target.head, dtype or target.dtype
    own = getattr(getattr(head, "weight", None), "dtype", kept)  # a stored head takes any
    ones = torch.eye(size, dtype=own, device=target.device)
    bias = head(ones.new_zeros(1, size))[0, tokens]
    columns = [head(part)[:, tokens] - bias for part in ones.split(256)]
    return torch.cat(columns).T.to(kept).contiguous(), bias.to(kept)
