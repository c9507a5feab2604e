"""Forwards in one call of C, with weights in few bits or small in float32.

Which models have one is said in `forerun.backends.architectures`. A token's logits have the same
bits whatever is run with it, on every instruction set (`forerun/csrc`). Keys and values are
float16, or float32 if the weights are.
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

from forerun.backends import architectures
from forerun.backends.panels import PackedMatrix, RawMatrix, format_number
from forerun.backends.stored import Linear, StoredEmbedding, StoredLinear
from forerun.backends.table import (
    ACTIVATIONS,
    SCORINGS,
    ExpertsTable,
    LayerTable,
    ModelTable,
    Norm,
    Rotation,
    activation_of,
)
from forerun.csrc.library import (
    BatchArgument,
    CacheArgument,
    ExpertsArgument,
    LayerArgument,
    MatrixArgument,
    ModelArgument,
    NormArgument,
    RotationArgument,
    library,
    run,
)
from forerun.engine.target import Capture
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache

# A float32 model with more parameters runs its own forward, because ours keeps copies of them.
MAX_COPIED_PARAMETERS = 1_000_000_000

_PLAIN_MODULES = {nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU}

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

    def norm(self, norm: Norm | None) -> NormArgument:
        """Return a norm for the library's structures; an empty one for None."""
        if norm is None:
            return NormArgument()
        return NormArgument(self.floats(norm.gain), self.floats(norm.bias))


@dataclass(frozen=True)
class RotationTable:
    """A rotation's tables of the first positions.

    Attributes:
        cos, sin: float32 [positions, r / 2].
        scale: float32 [positions] factors of queries, or None.
    """

    cos: Tensor
    sin: Tensor
    scale: Tensor | None

    @classmethod
    def of(cls, rotation: Rotation, positions: int) -> RotationTable:
        """Make the tables of a rotation."""
        places = torch.arange(positions, dtype=torch.float32)
        angles = torch.outer(places, rotation.frequencies.float())
        cos = angles.cos() * rotation.scaling
        sin = angles.sin() * rotation.scaling
        if not rotation.query_growth:
            return cls(cos, sin, None)
        steps = torch.floor(places / rotation.query_step)
        return cls(cos, sin, 1 + rotation.query_growth * torch.log(1 + steps))

    def argument(self, rotation: Rotation) -> RotationArgument:
        """Return the library's structure, which points to the tables."""
        scale = None if self.scale is None else self.scale.data_ptr()
        dims = 2 * len(rotation.frequencies)
        return RotationArgument(
            self.cos.data_ptr(), self.sin.data_ptr(), scale, dims, rotation.is_interleaved
        )


@dataclass(frozen=True)
class Rotated:
    """The library's structure of a model, with its tables of rotations. Nothing writes to them.

    A call reads one of these from its beginning to its end. So it does not matter to the call if
    another thread needs longer tables meanwhile. Whoever calls the library holds the object, and
    so keeps the tables alive.

    Attributes:
        model: the library's structure, which points to `arguments`.
        arguments: the library's structures of rotations, which point to the tables.
        tables: the tables of each rotation.
        positions: the number of positions in the tables.
    """

    model: ModelArgument
    arguments: ctypes.Array[RotationArgument]
    tables: Sequence[RotationTable]
    positions: int


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
        rotations: Sequence[Rotation],
        pointers: Pointers,
        kv_dtype: torch.dtype = torch.float16,
    ) -> None:
        """Prepare layers.

        Args:
            model: the library's structure without tables of rotations; it is copied.
            rotations: the model's rotations.
            pointers: what `model` points to.
            kv_dtype: float16 or float32, of keys and values.
        """
        self.width = model.d
        self.heads = model.heads
        self.groups = model.groups
        self.size = model.size
        self._pointers = pointers
        self._kv_dtype = kv_dtype
        self._rotations = tuple(rotations)
        self._plain = ModelArgument.from_buffer_copy(model)
        self._rotated = self._rotated_at(0)
        self._lock = Lock()  # guards `_rotated`, which only grows
        self._caches: WeakKeyDictionary[KVCache, tuple[int, Any]] = WeakKeyDictionary()

    def _rotated_at(self, positions: int) -> Rotated:
        tables = [RotationTable.of(rotation, positions) for rotation in self._rotations]
        pairs = zip(tables, self._rotations, strict=True)
        arguments = (RotationArgument * len(tables))(
            *(table.argument(rotation) for table, rotation in pairs)
        )
        model = ModelArgument.from_buffer_copy(self._plain)
        model.rotation = ctypes.addressof(arguments)
        model.rotations = len(tables)
        model.positions = positions
        return Rotated(model, arguments, tables, positions)

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
        table: ModelTable,
        embedding: RawMatrix,
        packed: Mapping[nn.Module, PackedMatrix],
        kv_dtype: torch.dtype = torch.float16,
    ) -> None:
        """Make the library's structures of a model.

        Args:
            table: the table of the model.
            embedding: its embedding.
            packed: all of its linear layers.
            kv_dtype: float16 or float32, of keys and values.
        """
        self.embedding = embedding
        self.head = packed[table.head]
        layers = (LayerArgument * len(table.layers))()
        pointers = Pointers(layers, embedding, packed)
        for argument, layer in zip(layers, table.layers, strict=True):
            _fill_attention(argument, layer, table, packed, pointers)
            _fill_mlp(argument, layer, packed, pointers)
        structure = ModelArgument(
            d=table.width,
            heads=table.heads,
            groups=table.groups,
            size=table.size,
            layers=len(layers),
            vocabulary=embedding.out,
            embed_format=format_number(embedding.type),
            norms_by_mean=table.are_norms_by_mean,
            layer=ctypes.addressof(layers),
            norm=pointers.norm(table.norm),
            embed=embedding.rows.ctypes.data,
            embed_row=embedding.rows.shape[1],
            head=self.head.argument,
            eps=table.eps,
            attention_scale=table.attention_scale,
            score_cap=table.score_cap,
            logit_cap=table.logit_cap,
            embedding_factor=table.embedding_factor,
            residual_factor=table.residual_factor,
            logit_factor=table.logit_factor,
        )
        self.layers = Layers(structure, table.rotations, pointers, kv_dtype)

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


def _fill_attention(
    argument: LayerArgument,
    layer: LayerTable,
    table: ModelTable,
    packed: Mapping[nn.Module, PackedMatrix],
    pointers: Pointers,
) -> None:
    """Set what a layer's attention needs in the library's structure."""
    sizes = [count * table.size for count in (table.heads, table.groups, table.groups)]
    matrices = {"q": layer.q, "k": layer.k, "v": layer.v}
    biases = dict(zip(matrices, _biases(list(matrices.values()), sizes), strict=True))
    for name, linear in matrices.items():
        if linear is not None:
            setattr(argument, name, packed[linear].argument)
        setattr(argument, f"{name}_bias", pointers.floats(biases[name]))
    argument.o = packed[layer.o].argument
    argument.o_bias = pointers.floats(layer.o.bias)
    argument.attention_norm = pointers.norm(layer.attention_norm)
    argument.attention_after = pointers.norm(layer.attention_after)
    argument.q_norm = pointers.floats(layer.q_norm)
    argument.k_norm = pointers.floats(layer.k_norm)
    argument.sinks = pointers.floats(layer.sinks)
    argument.norms_heads_together = layer.q_norm is not None and len(layer.q_norm) != table.size
    argument.norms_heads_rotated = layer.are_heads_normed_rotated
    argument.window = layer.window
    argument.rotation = -1 if layer.rotation is None else layer.rotation


def _fill_mlp(
    argument: LayerArgument,
    layer: LayerTable,
    packed: Mapping[nn.Module, PackedMatrix],
    pointers: Pointers,
) -> None:
    """Set what a layer's MLP and experts need in the library's structure."""
    gate = layer.gate
    down = layer.down
    if gate is not None and down is not None:
        has_gate = layer.up is not None or gate.out_features != down.in_features
        argument.gate = packed[gate].argument
        if layer.up is not None:
            argument.up = packed[layer.up].argument
        sizes = [down.in_features] * (1 + has_gate)
        biases = _biases([gate, layer.up][: len(sizes)], sizes)
        argument.gate_bias = pointers.floats(biases[0])
        argument.up_bias = pointers.floats(biases[1]) if has_gate else None
        argument.down = packed[down].argument
        argument.down_bias = pointers.floats(down.bias)
    if layer.experts is not None:
        experts = _experts(layer.experts, packed, pointers)
        pointers.keep(experts)
        argument.experts = ctypes.addressof(experts)
    argument.mlp_norm = pointers.norm(layer.mlp_norm)
    argument.mlp_after = pointers.norm(layer.mlp_after)
    argument.activation = ACTIVATIONS.index(activation_of(layer.activation))
    argument.is_parallel = layer.is_parallel


def _experts(
    table: ExpertsTable, packed: Mapping[nn.Module, PackedMatrix], pointers: Pointers
) -> ExpertsArgument:
    """Return the library's structure of a layer's experts."""
    argument = ExpertsArgument(
        router=packed[table.router].argument,
        router_bias=pointers.floats(table.router.bias),
        choice_bias=pointers.floats(table.choice_bias),
        count=len(table.gate),
        chosen=table.chosen,
        scoring=SCORINGS.index(table.scoring),
        norms_weights=table.are_weights_normed,
        factor=table.factor,
    )
    if table.shared_gate is not None:
        argument.shared_gate = packed[table.shared_gate].argument
    for name, linears in (("gate", table.gate), ("up", table.up), ("down", table.down)):
        arguments = [packed[linear].argument for linear in linears]
        matrices = (MatrixArgument * len(arguments))(*arguments)
        pointers.keep(matrices)
        setattr(argument, name, ctypes.addressof(matrices))
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.stack(biases).detach() if biases else None
        setattr(argument, f"{name}_bias", pointers.floats(bias))
    return argument


def _biases(linears: Sequence[Linear | None], sizes: Sequence[int]) -> list[Tensor | None]:
    """Return a bias of each size: those of the layers, or parts of the first one's, if it is all.

    Args:
        linears: layers beside each other; None for those whose outputs the first one has.
        sizes: the outputs of each.
    """
    first = linears[0]
    assert first is not None
    if all(linear is not None for linear in linears):
        return [None if linear is None else linear.bias for linear in linears]
    if first.bias is None:
        return [None] * len(sizes)
    return list(first.bias.split(list(sizes)))


def quantised_forward(model: PreTrainedModel) -> QuantisedForward | None:
    """Return the forward in C of a model of a known architecture, or None for another model.

    All its matrices must be packed, or float32 on a CPU with at most MAX_COPIED_PARAMETERS
    parameters. Without the library there is no such forward either. For float32 weights the forward
    keeps packed copies: do not train the model afterwards.
    """
    architecture = architectures.of_model(model)
    if architecture is None or library() is None:
        return None
    is_float = not isinstance(model.get_input_embeddings(), StoredEmbedding)
    if is_float and not _is_plain(model, architecture.plain_modules):
        return None
    table = architecture.table(model)
    if not table.is_in_c:
        return None
    return _float_forward(model, table) if is_float else _stored_forward(table)


def _stored_forward(table: ModelTable) -> QuantisedForward | None:
    """Return the forward of a model with matrices in few bits, if all of them are packed."""
    packed: dict[nn.Module, PackedMatrix] = {}
    for module in table.linears:
        if isinstance(module, StoredLinear) and isinstance(module.stored, PackedMatrix):
            packed[module] = module.stored
        elif isinstance(module, nn.Linear) and not module.weight.is_meta:  # a router
            packed[module] = PackedMatrix(RawMatrix.plain(module.weight))
    if len(packed) != len(table.linears):
        return None
    assert isinstance(table.embedding, StoredEmbedding)
    return QuantisedForward(table, table.embedding.stored, packed)


def _float_forward(model: PreTrainedModel, table: ModelTable) -> QuantisedForward | None:
    """Return the forward of a model with float32 weights, unless it is too large."""
    if model.num_parameters() > MAX_COPIED_PARAMETERS:
        return None
    copies: dict[nn.Module, PackedMatrix] = {}
    for module in table.linears:
        assert isinstance(module, nn.Linear)  # because the model is plain
        copies[module] = PackedMatrix(RawMatrix.plain(module.weight))
    assert isinstance(table.embedding, nn.Embedding)
    return QuantisedForward(table, RawMatrix.plain(table.embedding.weight), copies, torch.float32)


def _is_plain(model: PreTrainedModel, further: Sequence[type]) -> bool:
    """Return whether all modules are those of the architecture, with float32 weights on a CPU.

    Args:
        model: the model.
        further: classes of torch that the architecture has beside the usual ones.
    """
    homes = type(model).__module__, "transformers.activations"
    known = _PLAIN_MODULES | set(further)
    if not all(
        type(module) in known or type(module).__module__ in homes for module in model.modules()
    ):
        return False
    return all(
        parameter.dtype == torch.float32 and parameter.device.type == "cpu"
        for parameter in model.parameters()
    )
