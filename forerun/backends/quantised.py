"""The forward of the Llama family in one call of C, with weights in few bits or small in float32.

The family is Llama, Mistral, Qwen2, Qwen3 and SmolLM3. A token's logits have the same bits whatever
is run with it, on every instruction set (`forerun/csrc`). Keys and values are float16, or float32
if the weights are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.backends.family import (
    DecoderLayer,
    FamilyModel,
    family_model,
    head_size,
    is_plain,
    linears,
    rotary_dims,
    windows,
)
from forerun.backends.panels import PackedMatrix, RawMatrix, format_number
from forerun.backends.stored import StoredEmbedding, StoredLinear
from forerun.csrc.library import (
    BatchArgument,
    CacheArgument,
    LayerArgument,
    ModelArgument,
    library,
    run,
)
from forerun.engine.target import Capture
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache

# A float32 model with more parameters runs its own forward, because ours keeps copies of them.
MAX_COPIED_PARAMETERS = 1_000_000_000

Part = np.ndarray | Tensor | ctypes.Structure | None


@dataclass(frozen=True)
class FlatBatch:
    """New entries of some rows of a cache, row after row.

    All arrays are int32 [n]. Their names are those of the library's structure (`fr_batch`).

    Attributes:
        row, slot, position: where each entry is stored, and its position in the text.
        length: the entry sees its row's slots below this one.
        seen: how many further slots the entry sees, its own included. None for chains.
        paths: [n, P] these further slots. None for chains.
    """

    row: np.ndarray
    slot: np.ndarray
    position: np.ndarray
    length: np.ndarray
    seen: np.ndarray | None = None
    paths: np.ndarray | None = None


def lay_out(inputs: Inputs, cache: KVCache) -> FlatBatch:
    """Lay out new entries, and begin them in the cache."""
    lengths = [cache.lengths[row] for row in inputs.rows]
    counts = inputs.counts
    start = max(cache.lengths[: inputs.size])
    cache.begin(inputs.size, start, start + max(counts))
    texts = list(zip(inputs.rows, lengths, inputs.depths, strict=True))
    # For the few entries of a step, lists are faster than arrays.
    rows = [row for row, _, depths in texts for _ in depths]
    slots = [length + node for _, length, depths in texts for node in range(len(depths))]
    positions = [length + depth for _, length, depths in texts for depth in depths]
    row = np.array(rows, np.int32)
    slot = np.array(slots, np.int32)
    position = np.array(positions, np.int32)
    if inputs.masks is None:
        return FlatBatch(row, slot, position, slot + np.int32(1))
    # A mask begins with columns for the row's last committed slots.
    committed = inputs.masks[0].shape[1] - inputs.masks[0].shape[0]
    first_slots = np.asarray(lengths, np.int32) - np.int32(committed)
    seen = np.concatenate([mask.sum(1).numpy() for mask in inputs.masks]).astype(np.int32)
    paths = _paths(inputs.masks, first_slots, seen)
    return FlatBatch(row, slot, position, np.repeat(first_slots, counts), seen, paths)


def _paths(masks: Sequence[Tensor], first_slots: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return the slots [n, P] that the entries see, for masks that begin at `first_slots`."""
    paths = np.zeros((len(seen), int(seen.max())), np.int32)
    entry = 0
    for mask, first_slot in zip(masks, first_slots, strict=True):
        for visible in mask.numpy():
            # A parent comes before its children, so a path is in the order of depths.
            path = np.flatnonzero(visible)
            paths[entry, : len(path)] = path + first_slot
            entry += 1
    return paths


class Pointers:
    """Make addresses for the library's structures, and keep alive what they point to."""

    def __init__(self, *kept: object) -> None:
        """Keep these objects too, because structures will point into them."""
        self._kept = list(kept)

    def keep(self, *kept: object) -> None:
        """Keep further objects."""
        self._kept += kept

    def floats(self, tensor: Tensor | None) -> int | None:
        """Return the address of a float32 copy, or None for None.

        It is a copy, because C may read it while another thread trains the model or moves it.
        """
        if tensor is None:
            return None
        copied = tensor.detach().to(torch.float32, copy=True).contiguous()
        self._kept.append(copied)
        return int(copied.data_ptr())


@dataclass(frozen=True)
class Rotated:
    """The library's structure of a model, with its tables of rotations. Nothing writes to them.

    A call reads one of these from its beginning to its end. So it does not matter to the call if
    another thread needs longer tables meanwhile. Whoever calls the library holds the object, and
    so keeps the tables alive.

    Attributes:
        model: the library's structure, which points to the tables.
        cos, sin: float32 [positions, D / 2].
    """

    model: ModelArgument
    cos: Tensor
    sin: Tensor

    @property
    def positions(self) -> int:
        """The number of positions in the tables."""
        return len(self.cos)


class Layers:
    """Decoder layers and the final norm, for the C library.

    Several threads may run them, each with its own caches.

    Attributes:
        width: the size of a state.
        heads, groups, size: heads, key-value heads and head size of attention.
    """

    def __init__(
        self,
        model: ModelArgument,
        frequencies: Tensor,
        scaling: float,
        pointers: Pointers,
        kv_dtype: torch.dtype = torch.float16,
    ) -> None:
        """Prepare layers.

        Args:
            model: the library's structure without tables of rotations; it is copied.
            frequencies: [D / 2] of the rotation.
            scaling: of the rotation's cosines and sines.
            pointers: what `model` points to.
            kv_dtype: float16 or float32, of keys and values.
        """
        self.width = model.d
        self.heads = model.heads
        self.groups = model.groups
        self.size = model.size
        self._pointers = pointers
        self._kv_dtype = kv_dtype
        self._frequencies = frequencies.float()
        self._scaling = scaling
        self._plain = ModelArgument.from_buffer_copy(model)
        self._rotated = self._rotated_at(0)
        self._lock = Lock()  # guards `_rotated`, which only grows
        self._caches: WeakKeyDictionary[KVCache, tuple[int, Any]] = WeakKeyDictionary()

    def _rotated_at(self, positions: int) -> Rotated:
        places = torch.arange(positions, dtype=torch.float32)
        angles = torch.outer(places, self._frequencies)
        cos = angles.cos() * self._scaling
        sin = angles.sin() * self._scaling
        model = ModelArgument.from_buffer_copy(self._plain)
        model.cos = cos.data_ptr()
        model.sin = sin.data_ptr()
        model.positions = positions
        return Rotated(model, cos, sin)

    def rotate_to(self, end: int) -> Rotated:
        """Return the structure with tables of at least the first `end` positions.

        Hold the returned object while C reads it.
        """
        rotated = self._rotated
        if end <= rotated.positions:
            return rotated
        made = self._rotated_at(1 << max(end - 1, 255).bit_length())
        # Only the comparison is locked, because tables may take long to make. Another thread may
        # have kept longer ones in the meantime. Those stay: shorter ones would be made again soon.
        with self._lock:
            if made.positions > self._rotated.positions:
                self._rotated = made
        return made

    def cache(self, cache: KVCache) -> Any:
        """Return the addresses of a cache's keys and values, after allocating them if need be."""
        known = self._caches.get(cache)
        if known is not None and known[0] == cache.changes:
            return known[1]
        arguments = (CacheArgument * len(cache.layers))()
        for argument, layer in zip(arguments, cache.layers, strict=True):
            if not layer.is_initialized:
                state = torch.empty(1, self.groups, 1, self.size, dtype=self._kv_dtype)
                layer.lazy_initialization(state, state)
            both = layer.both
            assert both is not None and both[0, 0].is_contiguous() and both.dtype == self._kv_dtype
            argument.keys = both.data_ptr()
            argument.values = both[:, self.groups :].data_ptr()
            argument.row = both.stride(0)
            argument.group = both.stride(1)
            argument.rows = both.shape[0]
            argument.capacity = both.shape[2]
            argument.is_float32 = both.dtype == torch.float32
        self._caches[cache] = cache.changes, arguments
        return arguments

    def run(self, function: str, cache: KVCache, argument: ctypes.Structure, **parts: Part) -> int:
        """Call a function of the library on a cache; return its result.

        Args:
            function: its name.
            cache: with room for the new entries.
            argument: its structure, whose pointers are set here.
            **parts: what each pointer points to, by the name of the structure's field. A pointer to
                None or to an empty array stays NULL.
        """
        for name, part in parts.items():
            if isinstance(part, Tensor):
                assert part.is_contiguous()
                setattr(argument, name, part.data_ptr())
            elif isinstance(part, np.ndarray) and part.size:
                assert part.flags.c_contiguous
                first = ctypes.c_char.from_buffer(part.data)  # faster than `part.ctypes.data`
                setattr(argument, name, ctypes.addressof(first))
            elif isinstance(part, ctypes.Structure):
                setattr(argument, name, ctypes.addressof(part))
        # It has a name here because its tables must live until C returns.
        rotated = self.rotate_to(cache.capacity)
        return run(function, ctypes.byref(rotated.model), self.cache(cache), ctypes.byref(argument))

    def __call__(
        self,
        batch: FlatBatch,
        cache: KVCache,
        *,
        tokens: np.ndarray | None = None,
        states: Tensor | None = None,
        logits: int = 0,
        capture: Capture = "",
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run new entries.

        Args:
            batch: the entries.
            cache: where they are stored.
            tokens: int32 [n], or None.
            states: [n, d] in place of the tokens' embeddings; a head takes both.
            logits: outputs V of the LM head, or 0 for no logits.
            capture: the states to return.

        Returns:
            Logits [n, V] and captured states, both in float32, or None for what is not asked for.
            The states are [n, d] after the final norm, or [n, L d] after L layers.
        """
        n = len(batch.row)
        asked = n if logits else 0
        scores = torch.empty(n, logits) if logits else None
        after = np.array([] if isinstance(capture, str) else capture, np.int32)
        captured = torch.empty(n, self.width * max(1, len(after))) if capture else None
        argument = BatchArgument(n=n, asks=asked, captures=len(after))
        argument.path = 0 if batch.paths is None else batch.paths.shape[1]
        parts: dict[str, Part] = {
            "tokens": tokens,
            "states": None if states is None else states.float().contiguous(),
            "asked": np.arange(asked, dtype=np.int32),
            "after": after,
            "logits": scores,
            "captured" if len(after) else "normed": captured,
        }
        self.run("fr_forward", cache, argument, **vars(batch), **parts)
        return scores, captured


class QuantisedForward:
    """A `forerun.model.forward.Forward` in C.

    Attributes:
        embedding: the rows of the model's embedding.
        head: the LM head.
        layers: the layers and the final norm.
    """

    dtype = torch.float32  # of hidden states
    exact: Literal["bitwise"] = "bitwise"

    def __init__(
        self,
        model: FamilyModel,
        embedding: RawMatrix,
        packed: Mapping[nn.Module, PackedMatrix],
        kv_dtype: torch.dtype = torch.float16,
    ) -> None:
        """Make the library's structures of a model.

        Args:
            model: a model of the family.
            embedding: its embedding.
            packed: all of its linear layers.
            kv_dtype: float16 or float32, of keys and values.
        """
        config = model.config
        base = model.model
        self.embedding = embedding
        self.head = packed[model.lm_head]
        layers = (LayerArgument * len(base.layers))()
        pointers = Pointers(layers, embedding, packed)
        for argument, layer, window in zip(layers, base.layers, windows(model), strict=True):
            _fill_layer(argument, layer, packed, pointers)
            argument.window = window
            is_rotated = getattr(layer.self_attn, "use_rope", True)  # only SmolLM3's has it
            argument.rotary_dims = rotary_dims(model) if is_rotated else 0
        structure = ModelArgument(
            d=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            size=head_size(config),
            layers=len(layers),
            vocabulary=embedding.out,
            embed_format=format_number(embedding.type),
            layer=ctypes.addressof(layers),
            norm=pointers.floats(base.norm.weight),
            embed=embedding.rows.ctypes.data,
            embed_row=embedding.rows.shape[1],
            head=self.head.argument,
            eps=config.rms_norm_eps,
        )
        rotary = base.rotary_emb
        scaling = float(rotary.attention_scaling)
        self.layers = Layers(structure, rotary.inv_freq, scaling, pointers, kv_dtype)

    def __call__(
        self, inputs: Inputs, cache: KVCache, logits: bool, capture: Capture
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return logits [n, V], if wanted, and captured hidden states, in the order of `inputs`."""
        batch = lay_out(inputs, cache)
        assert inputs.tokens is not None
        flat = (token for row_tokens in inputs.tokens for token in row_tokens)
        tokens = np.fromiter(flat, np.int32, len(batch.row))
        outputs = self.head.out if logits else 0
        return self.layers(batch, cache, tokens=tokens, logits=outputs, capture=capture)


def _fill_layer(
    argument: LayerArgument,
    layer: DecoderLayer,
    packed: Mapping[nn.Module, PackedMatrix],
    pointers: Pointers,
) -> None:
    """Set a layer's matrices, biases and norms in the library's structure."""
    attention = layer.self_attn
    mlp = layer.mlp
    argument.q = packed[attention.q_proj].argument
    argument.k = packed[attention.k_proj].argument
    argument.v = packed[attention.v_proj].argument
    argument.o = packed[attention.o_proj].argument
    argument.gate = packed[mlp.gate_proj].argument
    argument.up = packed[mlp.up_proj].argument
    argument.down = packed[mlp.down_proj].argument
    argument.q_bias = pointers.floats(attention.q_proj.bias)
    argument.k_bias = pointers.floats(attention.k_proj.bias)
    argument.v_bias = pointers.floats(attention.v_proj.bias)
    argument.attention_norm = pointers.floats(layer.input_layernorm.weight)
    argument.mlp_norm = pointers.floats(layer.post_attention_layernorm.weight)
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)  # only Qwen3's attention has these
        setattr(argument, name, None if norm is None else pointers.floats(norm.weight))


def quantised_forward(model: PreTrainedModel) -> QuantisedForward | None:
    """Return the forward in C of a model of the family, or None for another model.

    All its matrices must be packed, or float32 on a CPU with at most MAX_COPIED_PARAMETERS
    parameters. Without the library there is no such forward either. For float32 weights the forward
    keeps packed copies: do not train the model afterwards.
    """
    member = family_model(model)
    if member is None:
        return None
    modules = linears(member)
    embedding = member.model.embed_tokens
    if isinstance(embedding, StoredEmbedding):
        packed: dict[nn.Module, PackedMatrix] = {}
        for module in modules:
            if isinstance(module, StoredLinear) and isinstance(module.stored, PackedMatrix):
                packed[module] = module.stored
        is_complete = len(packed) == len(modules)
        return QuantisedForward(member, embedding.stored, packed) if is_complete else None
    if library() is None or not is_plain(model):
        return None
    if model.num_parameters() > MAX_COPIED_PARAMETERS:
        return None
    copies: dict[nn.Module, PackedMatrix] = {}
    for module in modules:
        assert isinstance(module, nn.Linear)  # because the model is plain
        copies[module] = PackedMatrix(RawMatrix.plain(module.weight))
    return QuantisedForward(member, RawMatrix.plain(embedding.weight), copies, torch.float32)
