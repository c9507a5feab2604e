"""Heads over hidden states, for decoding, with a cache of one row a sequence."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.backends.panels import Product, product
from forerun.backends.quantised_heads import Beams, Growth, QuantisedHead, quantised_head
from forerun.backends.stored import StoredLinear, store_in_8_bits
from forerun.csrc.library import library
from forerun.heads.eagle3 import Eagle3Head
from forerun.heads.heads import HiddenDrafter
from forerun.model.batch import Inputs, causal, pad
from forerun.model.causal_lm import CausalLM
from forerun.model.kv_cache import KVCache
from forerun.model.rows import Rows

Head = HiddenDrafter | Eagle3Head


class TorchHead:
    """Run the layers of a head in torch, if the C library does not."""

    def __init__(
        self, head: Head, embedding: nn.Module, device: torch.device, dtype: torch.dtype, few: bool
    ) -> None:
        """`few`: run an EAGLE-3 head in 8 bits."""
        unused = [head.lm_head, head.embed_tokens] if isinstance(head, Eagle3Head) else []
        own: Any = copy.deepcopy(head, {id(part): None for part in unused})
        self.head: Any = own.to(device, dtype).requires_grad_(False)
        if isinstance(head, Eagle3Head) and few and library() is not None:
            store_in_8_bits(self.head)
        self._embedding = embedding

    def __call__(self, inputs: Inputs, cache: KVCache, tokens: Tensor | None) -> Tensor:
        """Return the next states [n, d] after those of `inputs`, with the tokens [n] after these if given."""
        head, given = self.head, inputs.given
        assert given is not None
        x = head.fused(given, None if tokens is None else self._embedding(tokens).to(given.dtype))
        batch = pad(replace(inputs, given=x), cache, x.device, x.dtype)
        assert batch.states is not None and not isinstance(batch.mask, dict)
        x, positions = batch.states, batch.positions
        mask = (
            causal(x.shape[1], batch.end, x.dtype, x.device) if batch.mask is None else batch.mask
        )
        for layer, stored in zip(head.layers, cache.layers, strict=True):
            queries, keys, values = layer.project(x, positions)
            keys, values = stored.update(keys, values)
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, enable_gqa=True
            )
            x = layer.finish(x, mixed)
        return inputs.unpad(head.finish(x))

    def information(self, tokens: Tensor) -> Tensor:
        """Return the token information T [.., S] of tokens [..]."""
        return self.head.token_information(tokens)


class HiddenLM(Rows):
    """A head of any kind with its cache, and the rows of the target's LM head for its hot set. It keeps copies of the
    weights: do not train the head afterwards. On a CPU the C library runs it in 8 bits if it can, as a draft may round,
    unless `few` is False.

    Attributes:
        kind: see `forerun.heads.heads.HEAD_KINDS`.
        capture: the target's states that are its features.
        reads: the last positions of a prompt that it reads.
        width, depth: size of a feature, and number of layers.
        hot: [S] the tokens that it has logits for.
        logits: maps states [n, d] to logits [n, S] without token information.
        information: maps tokens [..] to T [.., S] (lyanna); None for a head without it.
        curves: calibration, see `HiddenConfig`.
        quantised: the layers in C, or None.
    """

    @torch.no_grad()
    def __init__(self, head: Head, target: CausalLM, few: bool = True) -> None:
        few = few and target.device.type == "cpu"
        self.device, self.dtype = target.device, torch.float32 if few else target.dtype
        self.hot, self.vocab_size = head.hot.to(self.device), target.vocab_size
        self.kind, self.curves, self.capture = head.config.kind, head.config.curves, head.capture
        self.width, self.depth, self.reads = head.width, len(head.layers), head.reads
        self.cache = KVCache(self.depth)
        embedding = target.model.get_input_embeddings()
        self.quantised: QuantisedHead | None = None
        self.information: Product | None = None
        self._read: Product | None = None  # maps features to states
        if isinstance(head, Eagle3Head):
            layers = TorchHead(head, head.embed_tokens or embedding, self.device, self.dtype, few)
            rows = product(head.lm_head.weight.to(self.device, self.dtype), few=few)
            self.logits: Product = lambda states: rows(layers.head.before_logits(states))
            self._layers: QuantisedHead | TorchHead = layers
            self._read = layers.head.read
            return
        weight, bias = head_rows(target, self.hot, self.width, self.dtype)
        self.logits = product(weight, bias if bias.any() else None, few)
        self.quantised = quantised_head(head, embedding, self.logits) if few else None
        self._layers = self.quantised or TorchHead(head, embedding, self.device, self.dtype, few)
        self.information = self._layers.information if head.informed else None

    def fresh(self) -> HiddenLM:
        """Return the same head with a cache of its own."""
        other = copy.copy(self)
        other.cache = KVCache(self.depth)
        return other

    @torch.inference_mode()
    def prefill(
        self, id: int, features: Tensor, tokens: Sequence[int], chunk: int, reserve: int = 0
    ) -> Iterator[int]:
        """Add a sequence with features [n, d] and the tokens after them, run in a cache of one row of their own. Yield
        the size of each chunk, at most `chunk`."""
        prompt, count = KVCache(self.depth), len(features)
        prompt.add(0, count)
        for start in range(0, count, chunk):
            part = features[start : start + chunk].to(self.dtype)
            self._extend(prompt, [0], [part], [tokens[start : start + chunk]])
            yield len(part)
        self.add(id, max(reserve, count))
        if count:
            self.cache.copy_in(id, prompt.view(0, count), count)

    @torch.inference_mode()
    def extend(
        self, ids: Sequence[int], states: Sequence[Tensor], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Run and keep the next features [n_r, d], at least one, of each sequence, with the tokens after them. Return
        the head's states [R, d] after the last features."""
        return self._extend(self.cache, ids, [own.to(self.dtype) for own in states], tokens)

    def grows(self, width: int) -> bool:
        """Return whether `grow` drafts with so many beams. An EAGLE-like head's trees need Python."""
        return self.quantised is not None and (width == 1 or self.kind == "lyanna")

    @torch.inference_mode()
    def grow(
        self,
        ids: Sequence[int],
        states: Sequence[Tensor],
        tokens: Sequence[Sequence[int]],
        most: int,
        beams: Beams,
    ) -> Growth:
        """Draft `most` places of each sequence in one call of C. Run and keep the next features [n_r, d], at least one,
        of each, with the tokens after them; drafted states are not kept. To continue a draft give its last states
        [1, d] and one token each."""
        assert self.quantised is not None
        return self.quantised.grow(
            self.cache, ids, torch.cat(list(states)).to(self.dtype), tokens, most, beams
        )

    def _extend(
        self,
        cache: KVCache,
        ids: Sequence[int],
        states: Sequence[Tensor],
        tokens: Sequence[Sequence[int]],
    ) -> Tensor:
        x = states[0] if len(states) == 1 else torch.cat(list(states))
        x = x if self._read is None else self._read(x)
        after = torch.tensor([token for own in tokens for token in own], device=self.device)
        depths = [range(len(own)) for own in states]
        inputs = Inputs([cache.row(id) for id in ids], depths, given=x)
        x = self._layers(inputs, cache, after)
        cache.commit(ids, depths)
        return inputs.last(x)

    @torch.inference_mode()
    def roll(self, ids: Sequence[int], states: Tensor, steps: int) -> list[Tensor]:
        """Run and keep states [R, d] without tokens, then each state that follows. Return the `steps` states [R, d]
        that follow."""
        one, found = [range(1)] * len(ids), []
        for _ in range(steps):
            states = self._layers(self._inputs(ids, one, given=states), self.cache, None)
            self.cache.commit(ids, one)
            found.append(states)
        return found

    @torch.inference_mode()
    def branch(
        self, ids: Sequence[int], states: Tensor, tokens: Tensor, depth: int, seen: Tensor
    ) -> Tensor:
        """Run and keep states [R, w, d] with the tokens [R, w] after them, all `depth` places after each sequence's
        text. `seen` [R, w, P + w] bool is their attention mask over the last P kept states and over themselves.
        Return the next states [R, w, d]."""
        width = tokens.shape[1]
        depths = [[depth - (seen.shape[-1] - width)] * width] * len(ids)
        inputs = self._inputs(ids, depths, list(seen), given=states.flatten(0, 1))
        x = self._layers(inputs, self.cache, tokens.flatten())
        self.cache.commit(ids, [range(width)] * len(ids))
        return x.view(states.shape)


class HeadRows:
    """Look up the weight [n, d] and bias [n] of a model's LM head for tokens [n], however its weights are stored."""

    def __init__(self, target: CausalLM, size: int, dtype: torch.dtype | None = None) -> None:
        """Read the head for states of `size` numbers in `dtype`, by default the target's."""
        head: Any = target.head
        self._dtype = dtype or target.dtype
        if isinstance(head, StoredLinear):
            self._rows = lambda tokens: head.stored.floats(tokens.tolist())
            self._bias = torch.zeros(head.out_features) if head.bias is None else head.bias
        elif (
            type(head) is nn.Linear and type(head.weight.data) is Tensor and not head._forward_hooks
        ):
            self._rows = head.weight.__getitem__
            self._bias = head.weight.new_zeros(len(head.weight)) if head.bias is None else head.bias
        else:  # an unknown module, taken to be linear: one unit vector after the other
            own = getattr(getattr(head, "weight", None), "dtype", self._dtype)
            ones = torch.eye(size, dtype=own, device=target.device)
            self._bias = head(ones.new_zeros(1, size))[0]
            whole = torch.cat(
                [(head(part) - self._bias).to(self._dtype) for part in ones.split(256)]
            ).T
            self._rows = whole.__getitem__

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._rows(tokens).to(self._dtype).contiguous(), self._bias[tokens].to(self._dtype)


@torch.no_grad()
def head_rows(
    target: CausalLM, tokens: Tensor, size: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return copies of the weight [n, d] and bias [n] of `HeadRows` for tokens [n]."""
    weight, bias = HeadRows(target, size, dtype)(tokens)
    return weight.clone(), bias.clone()
