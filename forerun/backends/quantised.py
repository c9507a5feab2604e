"""The forward of the Llama family in one call of C: Llama, Mistral, Qwen2, Qwen3, SmolLM3, with weights in few bits, or
in float32 if they are small.

A token's logits have the same bits whatever is run with it, on every instruction set (`forerun/csrc`). Keys and values
are float16, or float32 if the weights are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.backends.panels import FORMATS, Panels, Rows
from forerun.backends.stored import StoredEmbedding, StoredLinear
from forerun.csrc.library import (
    BatchArgument,
    CacheArgument,
    LayerArgument,
    MatrixArgument,
    ModelArgument,
    library,
    run,
)
from forerun.engine.target import Capture
from forerun.model.batch import Inputs
from forerun.model.kv_cache import KVCache

FAMILY = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)
LARGEST = 1_000_000_000  # parameters of a float32 model, of whose weights copies are kept
Part = np.ndarray | Tensor | ctypes.Structure | None
_KNOWN = {nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU}
_ROPE = (
    "default",
    "linear",
    "llama3",
    "yarn",
)  # whose frequencies do not depend on how long a text is


@dataclass(frozen=True)
class FlatBatch:
    """New entries of some rows of a cache, row after row. All are int32 [n].

    Attributes:
        row, slot, position: where each entry is stored, and its position in the text.
        length: it sees its row's slots before this one.
        seen, paths: how many further slots it sees, its own included, and which [n, P]. None for chains.
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
    counts = [len(depths) for depths in inputs.depths]
    start = max(cache.lengths[: inputs.size])
    cache.begin(inputs.size, start, start + max(counts))
    each = list(zip(inputs.rows, lengths, inputs.depths, strict=True))
    # For the few entries of a step, lists are faster than arrays.
    rows = np.array([row for row, _, depths in each for _ in depths], np.int32)
    slots = np.array([at + node for _, at, depths in each for node in range(len(depths))], np.int32)
    positions = np.array([at + depth for _, at, depths in each for depth in depths], np.int32)
    if inputs.masks is None:
        return FlatBatch(rows, slots, positions, slots + np.int32(1))
    back = inputs.masks[0].shape[1] - inputs.masks[0].shape[0]
    first = np.asarray(lengths, np.int32) - np.int32(back)
    seen = np.concatenate([mask.sum(1).numpy() for mask in inputs.masks]).astype(np.int32)
    paths = np.zeros((len(rows), int(seen.max())), np.int32)
    node = 0
    for mask, start in zip(inputs.masks, first, strict=True):
        # A parent comes before its children, so a path is in the order of depths.
        for own in mask.numpy():
            path = np.flatnonzero(own)
            paths[node, : len(path)] = path + start
            node += 1
    return FlatBatch(rows, slots, positions, np.repeat(first, counts), seen, paths)


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
        return len(self.cos)


class Layers:
    """Decoder layers and the final norm, for the C library. Several threads may run them, each
    with its own caches.

    Attributes:
        width, heads, groups, size: width of states; heads, key-value heads and head size of attention.
    """

    def __init__(
        self,
        model: ModelArgument,
        frequencies: Tensor,
        scaling: float,
        kept: Any,
        kv_dtype: torch.dtype = torch.float16,
    ) -> None:
        """Prepare layers.

        Args:
            model: the library's structure without tables of rotations; it is copied.
            frequencies: [D / 2] of the rotation.
            scaling: of the rotation's cosines and sines.
            kept: what `model` points to.
            kv_dtype: float16 or float32, of keys and values.
        """
        self._kept, self._kv_dtype = kept, kv_dtype
        self.width, self.heads, self.groups, self.size = (
            model.d,
            model.heads,
            model.groups,
            model.size,
        )
        self._frequencies, self._scaling = frequencies.float(), scaling
        self._plain = ModelArgument.from_buffer_copy(model)
        self._rotated = self._rotated_at(0)
        self._lock = Lock()  # of `_rotated`, which only grows
        self._caches: WeakKeyDictionary[KVCache, tuple[int, Any]] = WeakKeyDictionary()

    def _rotated_at(self, positions: int) -> Rotated:
        places = torch.arange(positions, dtype=torch.float32)
        angles = torch.outer(places, self._frequencies)
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        model = ModelArgument.from_buffer_copy(self._plain)
        model.cos, model.sin, model.positions = cos.data_ptr(), sin.data_ptr(), positions
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
        """Return the addresses of a cache's keys and values, allocated first if need be."""
        known = self._caches.get(cache)
        if known is not None and known[0] == cache.changes:
            return known[1]
        arguments = (CacheArgument * len(cache.layers))()
        for at, layer in zip(arguments, cache.layers, strict=True):
            if not layer.is_initialized:
                state = torch.empty(1, self.groups, 1, self.size, dtype=self._kv_dtype)
                layer.lazy_initialization(state, state)
            both = layer.both
            assert both is not None and both[0, 0].is_contiguous() and both.dtype == self._kv_dtype
            at.keys, at.values = both.data_ptr(), both[:, self.groups :].data_ptr()
            at.row, at.group, at.rows, at.capacity = (
                both.stride(0),
                both.stride(1),
                both.shape[0],
                both.shape[2],
            )
            at.wide = both.dtype == torch.float32
        self._caches[cache] = cache.changes, arguments
        return arguments

    def run(self, function: str, cache: KVCache, argument: ctypes.Structure, **parts: Part) -> int:
        """Call a function of the library on a cache, with an argument that points to `parts`; return its result."""
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
        """Run tokens int32 [n] or states [n, d].

        Args:
            logits: outputs V of the LM head, or 0 for no logits.
            capture: the states to return.

        Returns:
            Logits [n, V] and captured states, [n, d] after the final norm or [n, L d] after L layers, in float32; None
            for either if not asked for.
        """
        n = len(batch.row)
        scores = torch.empty(n, logits) if logits else None
        after = np.array([] if capture == "head" else capture or [], np.int32)
        found = torch.empty(n, self.width * max(1, len(after))) if capture else None
        argument = BatchArgument(n=n, asks=n if logits else 0, captures=len(after))
        argument.path = 0 if batch.paths is None else batch.paths.shape[1]
        parts = {
            "captured" if len(after) else "normed": found,
            "states": None if states is None else states.float().contiguous(),
            "logits": scores,
        }
        place = np.arange(n if logits else 0, dtype=np.int32)
        self.run(
            "fr_forward",
            cache,
            argument,
            **vars(batch),
            tokens=tokens,
            asked=place,
            after=after,
            **parts,
        )
        return scores, found


class QuantisedForward:
    """A `forerun.model.forward.Forward` in C."""

    dtype = torch.float32  # of hidden states
    exact: Literal["bitwise"] = "bitwise"

    def __init__(
        self,
        model: PreTrainedModel,
        embedding: Rows,
        packed: Mapping[nn.Module, Panels],
        kv_dtype: torch.dtype = torch.float16,
    ) -> None:
        """`packed`: all of the model's linear layers; `kv_dtype`: see `Layers`."""
        config: Any = model.config
        base: Any = model.model
        self.embedding, self.head = embedding, packed[model.lm_head]
        rotary = base.rotary_emb
        turned = 2 * len(rotary.inv_freq)
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None) or 0
        arguments = (LayerArgument * len(base.layers))()
        kept: list[Any] = [arguments, embedding, packed]

        def floats(part: Tensor | None) -> int | None:
            if part is None:
                return None
            # A copy, because C may read it while somebody trains the model or moves it.
            kept.append(part.detach().to(torch.float32, copy=True).contiguous())
            return int(kept[-1].data_ptr())

        def panels(linear: nn.Module) -> MatrixArgument:
            return packed[linear].argument

        for number, (at, layer) in enumerate(zip(arguments, base.layers, strict=True)):
            attention, mlp = layer.self_attn, layer.mlp
            for name in ("q", "k", "v"):
                linear = getattr(attention, f"{name}_proj")
                setattr(at, name, panels(linear))
                setattr(at, f"{name}_bias", floats(linear.bias))
            at.o = panels(attention.o_proj)
            at.gate, at.up, at.down = (
                panels(mlp.gate_proj),
                panels(mlp.up_proj),
                panels(mlp.down_proj),
            )
            at.first, at.second = (
                floats(layer.input_layernorm.weight),
                floats(layer.post_attention_layernorm.weight),
            )
            for name in ("q_norm", "k_norm"):
                setattr(at, name, floats(getattr(getattr(attention, name, None), "weight", None)))
            slides = kinds[number] == "sliding_attention" if kinds else bool(window)
            at.window = window if slides else 0
            at.turned = turned if getattr(attention, "use_rope", True) else 0
        argument = ModelArgument(
            d=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            size=head_size(config),
            layers=len(arguments),
            vocabulary=embedding.out,
            embed_format=FORMATS.index(embedding.type),
            layer=ctypes.addressof(arguments),
            norm=floats(base.norm.weight),
            embed=embedding.rows.ctypes.data,
            embed_row=embedding.rows.shape[1],
            head=self.head.argument,
            eps=config.rms_norm_eps,
        )
        self.layers = Layers(
            argument, rotary.inv_freq, float(rotary.attention_scaling), kept, kv_dtype
        )

    def __call__(
        self, inputs: Inputs, cache: KVCache, logits: bool, capture: Capture
    ) -> tuple[Tensor | None, Tensor | None]:
        batch = lay_out(inputs, cache)
        assert inputs.tokens is not None
        tokens = np.fromiter(
            (token for own in inputs.tokens for token in own), np.int32, len(batch.row)
        )
        return self.layers(
            batch, cache, tokens=tokens, logits=self.head.out if logits else 0, capture=capture
        )


def quantised_forward(model: Any) -> QuantisedForward | None:
    """Return the forward of a model of the family whose weights are `Panels`, or float32 on a CPU with at most LARGEST
    parameters; None for another one and without the library.

    Of float32 weights it keeps copies, packed: do not train the model afterwards.
    """
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if type(model).__name__ not in FAMILY or not type(model).__module__.startswith(
        "transformers.models."
    ):
        return None
    if config.hidden_act != "silu" or rope not in _ROPE or getattr(config, "mlp_bias", False):
        return None
    embedding, head, linears = model.model.embed_tokens, model.lm_head, [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if attention.o_proj.bias is not None:
            return None
    sizes = (
        config.hidden_size,
        config.intermediate_size,
        head_size(config),
        2 * len(model.model.rotary_emb.inv_freq),
    )
    if head.bias is not None or any(size % 8 for size in sizes) or sizes[-1] % 16:
        return None
    if isinstance(embedding, StoredEmbedding):
        stored = {each: each.stored for each in linears if isinstance(each, StoredLinear)}
        packed: dict[nn.Module, Panels] = {
            each: own for each, own in stored.items() if isinstance(own, Panels)
        }
        return (
            QuantisedForward(model, embedding.stored, packed)
            if len(packed) == len(linears)
            else None
        )
    if library() is None or not _is_plain(model) or model.num_parameters() > LARGEST:
        return None
    copies = {each: Panels(Rows.plain(each.weight)) for each in linears}
    return QuantisedForward(model, Rows.plain(embedding.weight), copies, torch.float32)


def _is_plain(model: PreTrainedModel) -> bool:
    """Return whether all modules are those of the architecture, with float32 weights on a CPU."""
    homes = type(model).__module__, "transformers.activations"
    known = all(type(each) in _KNOWN or type(each).__module__ in homes for each in model.modules())
    return known and all(
        each.dtype == torch.float32 and each.device.type == "cpu" for each in model.parameters()
    )


def head_size(config: PreTrainedConfig) -> int:
    """Return the size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
