"""Heads over hidden states, for decoding, with a cache of one row per sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

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

_UNIT_VECTORS = 256  # that go through an unknown LM head at a time


class AttentionLayer(Protocol):
    """A layer of a head, in two parts around its attention."""

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, N, D], keys and values [B, G, N, D] of states [B, N, ..]."""

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output from its input and the output of attention [B, H, N, D]."""


class TorchHead:
    """Run the layers of a head in torch, if the C library does not.

    Attributes:
        head: a copy of the head.
    """

    def __init__(
        self,
        head: Head,
        embedding: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        in_8_bits: bool,
    ) -> None:
        """Copy a head.

        Args:
            head: the head.
            embedding: the embedding of its tokens.
            device: where it runs.
            dtype: of its weights.
            in_8_bits: round the weights of an EAGLE-3 head to 8 bits.
        """
        unused = [head.lm_head, head.embed_tokens] if isinstance(head, Eagle3Head) else []
        # What is in the memo of `deepcopy` is not copied.
        copied: Any = copy.deepcopy(head, {id(part): None for part in unused})
        self.head: Head = copied.to(device, dtype).requires_grad_(False)
        if isinstance(head, Eagle3Head) and in_8_bits and library() is not None:
            store_in_8_bits(self.head)
        self._embedding = embedding

    def __call__(self, inputs: Inputs, cache: KVCache, tokens: Tensor | None) -> Tensor:
        """Return the next states [n, d] after those of `inputs`.

        `tokens` [n] are those after the given states, or None to run states alone.
        """
        given = inputs.given
        assert given is not None
        embedded = None if tokens is None else self._embedding(tokens).to(given.dtype)
        x = self.head.fused(given, embedded)
        batch = pad(replace(inputs, given=x), cache, x.device, x.dtype)
        assert batch.states is not None and not isinstance(batch.mask, dict)
        x = batch.states
        mask = batch.mask
        if mask is None:
            mask = causal(x.shape[1], batch.end, x.dtype, x.device)
        layers = cast(Sequence[AttentionLayer], self.head.layers)
        for layer, stored in zip(layers, cache.layers, strict=True):
            queries, keys, values = layer.project(x, batch.positions)
            keys, values = stored.update(keys, values)
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, enable_gqa=True
            )
            x = layer.finish(x, mixed)
        return inputs.unpad(self.head.finish(x))

    def information(self, tokens: Tensor) -> Tensor:
        """Return the token information T [.., S] of tokens [..]."""
        assert isinstance(self.head, HiddenDrafter)
        return self.head.token_information(tokens)


class HiddenLM(Rows):
    """A head of any kind with its cache, and the rows of the target's LM head for its hot set.

    It keeps copies of the weights: do not train the head afterwards. On a CPU the C library runs it
    in 8 bits if it can, because a draft may round.

    Attributes:
        kind: see `forerun.heads.heads.HEAD_KINDS`.
        capture: the target's states that are its features.
        reads: how many of a prompt's last positions it reads.
        width, depth: the size of a feature, and the number of layers.
        hot: [S] the tokens that it has logits for.
        vocab_size: of the target.
        logits: maps states [n, d] to logits [n, S] without token information.
        information: maps tokens [..] to T [.., S] (lyanna); None for a head without it.
        curves: calibration, see `HiddenConfig`.
        quantised: the layers in C, or None.
    """

    @torch.no_grad()
    def __init__(self, head: Head, target: CausalLM, in_8_bits: bool = True) -> None:
        """Prepare a head for its target. `in_8_bits` has no effect unless it runs on a CPU."""
        in_8_bits = in_8_bits and target.device.type == "cpu"
        self.device = target.device
        self.dtype = torch.float32 if in_8_bits else target.dtype
        self.hot = head.hot.to(self.device)
        self.vocab_size = target.vocab_size
        self.kind = head.config.kind
        self.curves = head.config.curves
        self.capture = head.capture
        self.width = head.width
        self.depth = len(head.layers)
        self.reads = head.reads
        self.cache = KVCache(self.depth)
        self.quantised: QuantisedHead | None = None
        self.information: Product | None = None
        self._read: Product | None = None  # maps features to states
        embedding = target.model.get_input_embeddings()
        if isinstance(head, Eagle3Head):
            tokens = head.embed_tokens or embedding
            layers = TorchHead(head, tokens, self.device, self.dtype, in_8_bits)
            copied = layers.head
            assert isinstance(copied, Eagle3Head)
            weight = head.lm_head.weight.to(self.device, self.dtype)
            rows = product(weight, in_8_bits=in_8_bits)
            self.logits: Product = lambda states: rows(copied.before_logits(states))
            self._layers: QuantisedHead | TorchHead = layers
            self._read = copied.read
            return
        weight, bias = head_rows(target, self.hot, self.width, self.dtype)
        self.logits = product(weight, bias if bias.any() else None, in_8_bits)
        if in_8_bits:
            self.quantised = quantised_head(head, embedding, self.logits)
        if self.quantised is not None:
            self._layers = self.quantised
        else:
            self._layers = TorchHead(head, embedding, self.device, self.dtype, in_8_bits)
        if head.informed:
            self.information = self._layers.information

    def fresh(self) -> HiddenLM:
        """Return the same head with its own, empty cache."""
        other = copy.copy(self)
        other.cache = KVCache(self.depth)
        return other

    @torch.inference_mode()
    def prefill(
        self, id: int, features: Tensor, tokens: Sequence[int], chunk: int, reserve: int = 0
    ) -> Iterator[int]:
        """Add a sequence, after running its prompt in chunks in a cache of one row.

        Args:
            id: the sequence.
            features: [n, d] of the prompt.
            tokens: the tokens after the features.
            chunk: the largest number of features of a chunk.
            reserve: positions to reserve, if they are more than the features.

        Yields:
            The number of features of each chunk.
        """
        count = len(features)
        prompt = KVCache(self.depth)
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
        """Run and keep the next features of each sequence, with the tokens after them.

        `states` are the features, [n_r, d] of each sequence with n_r > 0. Return the head's states
        [R, d] after the last ones.
        """
        return self._extend(self.cache, ids, [state.to(self.dtype) for state in states], tokens)

    def grows(self, width: int) -> bool:
        """Return whether `grow` can draft with this number of beams.

        An EAGLE-like head's trees need Python.
        """
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
        """Draft `most` places of each sequence in one call of C.

        Run and keep the next features [n_r, d] of each sequence, at least one, with the tokens
        after them; drafted states are not kept. To continue a draft, give its last states [1, d]
        and one token each.
        """
        assert self.quantised is not None
        features = torch.cat(list(states)).to(self.dtype)
        return self.quantised.grow(self.cache, ids, features, tokens, most, beams)

    def _extend(
        self,
        cache: KVCache,
        ids: Sequence[int],
        states: Sequence[Tensor],
        tokens: Sequence[Sequence[int]],
    ) -> Tensor:
        x = states[0] if len(states) == 1 else torch.cat(list(states))
        if self._read is not None:
            x = self._read(x)
        flat = [token for row_tokens in tokens for token in row_tokens]
        depths = [range(len(state)) for state in states]
        inputs = Inputs([cache.row(id) for id in ids], depths, given=x)
        x = self._layers(inputs, cache, torch.tensor(flat, device=self.device))
        cache.commit(ids, depths)
        return inputs.last(x)

    @torch.inference_mode()
    def roll(self, ids: Sequence[int], states: Tensor, steps: int) -> list[Tensor]:
        """Run and keep states [R, d] without tokens, then each state that follows.

        Return the `steps` states [R, d] that follow.
        """
        one = [range(1)] * len(ids)
        following = []
        for _ in range(steps):
            states = self._layers(self._inputs(ids, one, given=states), self.cache, None)
            self.cache.commit(ids, one)
            following.append(states)
        return following

    @torch.inference_mode()
    def branch(
        self, ids: Sequence[int], states: Tensor, tokens: Tensor, depth: int, seen: Tensor
    ) -> Tensor:
        """Run and keep states of a tree's level, and return the next states [R, w, d].

        Args:
            ids: the sequences.
            states: [R, w, d] the states.
            tokens: [R, w] the tokens after them.
            depth: how many places they are after each sequence's text.
            seen: [R, w, P + w] bool: their attention mask over the last P kept states and over
                themselves.
        """
        width = tokens.shape[1]
        depths = [[depth - (seen.shape[-1] - width)] * width] * len(ids)
        inputs = self._inputs(ids, depths, list(seen), given=states.flatten(0, 1))
        x = self._layers(inputs, self.cache, tokens.flatten())
        self.cache.commit(ids, [range(width)] * len(ids))
        return x.view(states.shape)


class HeadRows:
    """Look up rows of a model's LM head, however its weights are stored."""

    def __init__(self, target: CausalLM, size: int, dtype: torch.dtype | None = None) -> None:
        """Read the head.

        Args:
            target: the model.
            size: the size of a state.
            dtype: of the rows; None for the target's.
        """
        head: Any = target.head
        self._dtype = dtype or target.dtype
        self._rows: Callable[[Tensor], Tensor]
        self._bias: Tensor
        if isinstance(head, StoredLinear):
            self._rows = lambda tokens: head.stored.floats(tokens.tolist())
            self._bias = torch.zeros(head.out_features) if head.bias is None else head.bias
        elif _is_plain_linear(head):
            self._rows = head.weight.__getitem__
            self._bias = head.weight.new_zeros(len(head.weight)) if head.bias is None else head.bias
        else:
            weight, self._bias = self._probed(head, size, target.device)
            self._rows = weight.__getitem__

    def _probed(self, head: Any, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the weight [V, d] and bias [V] of an unknown module, assumed to be linear.

        They are its outputs for unit vectors and for 0.
        """
        dtype = getattr(getattr(head, "weight", None), "dtype", self._dtype)
        vectors = torch.eye(size, dtype=dtype, device=device)
        bias = head(vectors.new_zeros(1, size))[0]
        parts = [(head(part) - bias).to(self._dtype) for part in vectors.split(_UNIT_VECTORS)]
        return torch.cat(parts).T, bias

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight [n, d] and bias [n] of tokens [n]."""
        return self._rows(tokens).to(self._dtype).contiguous(), self._bias[tokens].to(self._dtype)


def _is_plain_linear(head: nn.Module) -> bool:
    """Return whether a module is a linear layer with a plain weight and without hooks."""
    if type(head) is not nn.Linear or head._forward_hooks:
        return False
    return type(head.weight.data) is Tensor


@torch.no_grad()
def head_rows(
    target: CausalLM, tokens: Tensor, size: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return copies of the weight [n, d] and bias [n] of `HeadRows` for tokens [n]."""
    weight, bias = HeadRows(target, size, dtype)(tokens)
    return weight.clone(), bias.clone()
