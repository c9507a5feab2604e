"""Heads over hidden states for decoding: with a cache, one row a sequence."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.backends.information import token_information
from forerun.backends.lean import LeanLayers
from forerun.backends.packed import Product, product
from forerun.backends.quantised_heads import QuantisedHead, quantised_head
from forerun.backends.stored import StoredLinear
from forerun.heads.heads import HeadLayer, HiddenDrafter
from forerun.model.batch import Inputs, pad
from forerun.model.causal_lm import CausalLM
from forerun.model.kv_cache import KVCache
from forerun.model.rows import Rows


@dataclass(frozen=True)
class Guess:
    """Tokens of a chain, how probable the head finds each, and their states' logits [n, S] without token information
    and old ones."""

    tokens: list[int]
    chances: list[float]
    logits: Tensor


class HiddenLM(Rows):
    """A head of any kind, with the target's LM head for its hot set. It keeps copies of the weights: do not train the
    head afterwards. On a CPU they are in 8 bits unless `few` is False, as a draft may round.

    Attributes:
        kind: see `forerun.heads.heads.KINDS`.
        width, depth: size of a state, and number of layers.
        hot: [S] the tokens that it gives logits of.
        logits: of states [n, d], logits [n, S] without token information.
        information: of tokens [..], T [.., S] (lyanna). None for a head without it.
        curves: calibration, see `HiddenConfig`.
        quantised: runs the layers instead, where the C library can.
    """

    quantised: QuantisedHead | None = None
    information: Product | None = None
    both: Product  # of states with tokens, with the first matrix
    between: Product  # of states alone (lyanna; an EAGLE-like head has no use for it)

    @torch.no_grad()
    def __init__(self, head: HiddenDrafter, target: CausalLM, few: bool = True) -> None:
        config = head.config
        self.kind, self.width = config.kind, config.hidden_size
        few = few and target.device.type == "cpu"
        self.device, self.dtype = target.device, torch.float32 if few else target.dtype
        multiply = functools.partial(product, one_row=True, few=few)
        self.hot, self.vocab_size = head.hot.to(self.device), target.vocab_size
        self.curves = config.curves
        weight, bias = head_rows(target, self.hot, self.width, self.dtype)
        self.logits: Product = multiply(weight, bias if bias.any() else None)
        self.depth = config.num_hidden_layers
        self._empty()
        self.embeddings = target.model.get_input_embeddings()
        self.information = token_information(head, self.dtype, few)
        self.quantised = quantised_head(head) if few else None
        if self.quantised is not None:
            self.both, self.between = self.quantised.both, self.quantised.between
            return
        fuse = head.fuse.weight.to(self.dtype)
        self.both = multiply(fuse)
        self.between = multiply(fuse[:, : self.width].contiguous()) if self.kind == "lyanna" else self.both
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
        self.cache, self._prompt = KVCache(self.depth), KVCache(self.depth)
        self._guessed: list[Tensor] = []  # states of the last guess, and their logits
        self._logits: list[Tensor] = []
        self._last = 0

    def fresh(self) -> HiddenLM:
        """Return the same head with a cache of its own."""
        other = copy.copy(self)
        other._empty()
        return other

    @torch.inference_mode()
    def prefill(self, id: int, features: Tensor, tokens: Sequence[int], chunk: int, reserve: int = 0) -> Iterator[int]:
        """Add a sequence with features [n, d] and the tokens after them. They run in a cache of one row; yield the
        size of each chunk, at most `chunk`."""
        prompt, count = self._prompt, len(features)
        prompt.reset()
        prompt.add(0, count)
        for start in range(0, count, chunk):
            part = features[start : start + chunk].to(self.dtype)
            self._extend(prompt, [0], [part], [tokens[start : start + chunk]])
            yield len(part)
        self.add(id, max(reserve, count))
        if count:
            self.cache.copy_in(id, prompt.view(0, count), count)

    @torch.inference_mode()
    def extend(self, ids: Sequence[int], states: Sequence[Tensor], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run and keep the next features [n_r, d] of each sequence, at least one, with the tokens after them. Return
        the head's states [R, d] after each sequence's last one."""
        return self._extend(self.cache, ids, [own.to(self.dtype) for own in states], tokens)

    def guesses(self, id: int, count: int, most: int) -> bool:
        """Return whether `guess` can draft `most` tokens after `count` features of a sequence, and is worth it."""
        context = 0 if self.quantised is None else self.quantised.context
        return 0 < count <= context - most - self.length(id)

    @torch.inference_mode()
    def guess(
        self,
        id: int,
        features: Tensor,
        tokens: Sequence[int],
        root: int,
        most: int,
        start: int = 0,
        old: Tensor | None = None,
        weight: float = 0.0,
    ) -> Guess:
        """Draft a chain of argmax tokens after `root`. Run and keep the next features [n, d] of the sequence with the
        tokens after them; drafted states are not kept.

        With a `start` continue the draft of that length that the last call made of the same features. `old` [m, S]:
        logits of the first places that are added with `weight`.
        """
        row, last = self.cache.row(id), start + most
        logits = self._logits[:start]
        if not start:
            self._guessed = [self.extend([id], [features], [tokens])]
        length, states = self.cache.lengths[row], self._guessed
        before = self._last if start else root
        self.cache.lengths[row] += max(len(states) - 1, 0)
        if self.kind == "lyanna":
            states += self.roll([id], states[-1], last - len(states))
        found, chances = list[int](), list[float]()
        for place in range(start, last):
            if place == len(states):
                seen, token = torch.ones(1, 1, place, dtype=torch.bool), torch.tensor([[before]])
                states.append(self.branch([id], states[-1][:, None], token, place - 1, seen)[:, 0])
            sums = self.logits(states[place])[0].float()
            logits.append(sums)
            if old is not None and place < len(old):
                sums = sums + weight * old[place]
            if self.information is not None:
                sums = sums + self.information(torch.tensor([before]))[0]
            best = int(sums.argmax())
            before = int(self.hot[best])
            found.append(before)
            chances.append(float(sums.softmax(-1)[best]))
        self.cache.lengths[row], self._logits, self._last = length, logits, before
        return Guess(found, chances, torch.stack(logits))

    def _extend(
        self, cache: KVCache, ids: Sequence[int], states: Sequence[Tensor], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        x = states[0] if len(states) == 1 else torch.cat(list(states))
        x = self._beside(x, torch.tensor([token for own in tokens for token in own], device=self.device))
        depths = [range(len(own)) for own in states]
        inputs = Inputs([cache.row(id) for id in ids], depths, given=self.both(x))
        x = self._run(inputs, cache)
        cache.commit(ids, depths)
        return inputs.last(x)

    @torch.inference_mode()
    def roll(self, ids: Sequence[int], states: Tensor, steps: int) -> list[Tensor]:
        """Run and keep states [R, d] without tokens, then the states that follow, and so on; return the `steps` states
        [R, d] that follow."""
        one, found = [range(1)] * len(ids), []
        for _ in range(steps):
            states = self._run(self._inputs(ids, one, given=self.between(states)), self.cache)
            self.cache.commit(ids, one)
            found.append(states)
        return found

    @torch.inference_mode()
    def branch(self, ids: Sequence[int], states: Tensor, tokens: Tensor, depth: int, seen: Tensor) -> Tensor:
        """Run and keep states [R, w, d] with the tokens [R, w] after them, all of them `depth` places after each
        sequence's text. `seen` [R, w, P + w] bool: which of the P states that were kept last, and of themselves, each
        one sees. Return the states [R, w, d] after them."""
        width = tokens.shape[1]
        depths = [[depth - (seen.shape[-1] - width)] * width] * len(ids)
        x = self.both(self._beside(states.flatten(0, 1), tokens.flatten()))
        x = self._run(self._inputs(ids, depths, list(seen), given=x), self.cache)
        self.cache.commit(ids, [range(width)] * len(ids))
        return x.view(states.shape)

    def _beside(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return states [n, d] with the embeddings of tokens [n], as the first matrix takes them [n, 2 d]."""
        embedded = self.embeddings(tokens).to(x.dtype)
        return torch.cat([x, functional.rms_norm(embedded, embedded.shape[-1:])], -1)

    def _run(self, inputs: Inputs, cache: KVCache) -> Tensor:
        """Return states [n, d] of inputs that have gone through the first matrix."""
        if self.quantised is not None:
            return self.quantised(inputs, cache)
        batch = pad(inputs, cache, self.device, self.dtype)
        # Beyond its context stands a row that drafts as deep as its neighbours, for nothing.
        batch = replace(batch, positions=batch.positions.clamp(max=self.layers.context - 1))
        assert batch.states is not None
        x = self.layers(batch.states.flatten(0, 1), batch, cache)
        return self.layers.normed(inputs.unpad(x.view(batch.states.shape))) * self.gain


class HeadRows:
    """Weight [n, d] and bias [n] of a model's LM head for some tokens [n], whatever form its weights are stored in."""

    def __init__(self, target: CausalLM, size: int, dtype: torch.dtype | None = None) -> None:
        """`size` is that of the states it reads, `dtype` theirs if it is not the target's."""
        head: Any = target.head
        self._dtype = dtype or target.dtype
        if isinstance(head, StoredLinear):
            self._rows = lambda tokens: head.stored.floats(tokens.tolist())
            self._bias = torch.zeros(head.out_features) if head.bias is None else head.bias
        elif type(head) is nn.Linear and type(head.weight.data) is Tensor and not head._forward_hooks:
            self._rows = head.weight.__getitem__
            self._bias = head.weight.new_zeros(len(head.weight)) if head.bias is None else head.bias
        else:  # what it gives for one number of a state after the other
            own = getattr(getattr(head, "weight", None), "dtype", self._dtype)
            ones = torch.eye(size, dtype=own, device=target.device)
            self._bias = head(ones.new_zeros(1, size))[0]
            whole = torch.cat([(head(part) - self._bias).to(self._dtype) for part in ones.split(256)]).T
            self._rows = whole.__getitem__

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._rows(tokens).to(self._dtype).contiguous(), self._bias[tokens].to(self._dtype)


@torch.no_grad()
def head_rows(target: CausalLM, tokens: Tensor, size: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return `HeadRows` of these tokens alone."""
    weight, bias = HeadRows(target, size, dtype)(tokens)
    return weight.clone(), bias.clone()
