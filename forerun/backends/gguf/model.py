"""Load a model of transformers' class from a GGUF file.

Its configuration comes from the metadata. Then its weights come tensor by tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf.gguf_reader import ReaderTensor
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from forerun.backends import architectures
from forerun.backends.architectures.architecture import Architecture
from forerun.backends.gguf.metadata import Metadata
from forerun.backends.gguf.rotation import LONG_FACTORS, SHORT_FACTORS, rotation_of_file
from forerun.backends.panels import RawMatrix, check_inputs, pack
from forerun.backends.stored import (
    STORED_TYPES,
    ExpertLinears,
    StoredEmbedding,
    StoredExperts,
    StoredLinear,
    embedding_factor,
    expert_activation,
    is_experts,
    join_halves,
)
from forerun.zoo.formats import LIBRARY_FORMATS, WIDENED
from forerun.zoo.gguf_file import EMBEDDING, HEAD, GgufFile, open_gguf
from forerun.zoo.wide_rows import wide_rows

# What ends a text, by names in the metadata: its end, the end of a turn, and that of a message.
_ENDS = ("eos", "eot", "eom")
_FREQUENCY_FACTORS = "rope_freqs.weight"
# Formats of a file that already have the bits of a weight format.
_KEPT = {
    "int4": (Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4),
    "int8": (Type.Q8_0,),
    "bfloat16": (Type.BF16,),
}
# Tensors beside the layers, by their modules.
_OUTER_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
# Tensors that are no module's.
_TABLES = (_FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS)


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a model's layers: their number, their width, and those of their attention."""

    layers: int
    width: int
    heads: int
    groups: int
    head: int


def load_gguf(path: str | Path, kind: str | None = None) -> tuple[PreTrainedModel, str | None]:
    """Return the model of a GGUF file on the CPU, and a line about matrices of changed format.

    Linear layers become `StoredLinear` and the embedding becomes `StoredEmbedding`, without a float
    copy of the model. A file whose matrices are all F16 or F32 gives an ordinary model in float32.
    Norms and biases are always float32.

    Args:
        path: the file.
        kind: "bfloat16", "int8" or "int4" for every matrix, or "float32" for an ordinary model.
            None for the file's formats; IQ1, IQ2, IQ3 and TQ matrices are widened without rounding,
            and others that the C library does not support are rounded to 8 bits.

    Returns:
        The model, and the line, or None if no format was changed.

    Raises:
        ValueError: `open_gguf` or `gguf_config` raises it, or a tensor is missing, unknown, of
            another size or of a type that `gguf` cannot read.
    """
    filling = _checked_filling(path)
    file = filling.file
    model = filling.model
    note = None
    if kind == "float32" or (kind is None and file.is_float):
        _fill_plain(filling)
    else:
        note = _fill(filling, kind)
    model.generation_config = GenerationConfig(**special_ids(file))
    model.config.name_or_path = str(path)
    return model.eval(), note


def model_without_weights(path: str | Path) -> PreTrainedModel:
    """Return the model of a GGUF file as `load_gguf` would, but with weights on no device.

    Raises:
        ValueError: `load_gguf` would raise it.
    """
    model: PreTrainedModel = _checked_filling(path).model
    return model


def _checked_filling(path: str | Path) -> _Filling:
    """Return a file with its model, which has no weights yet. Raises ValueError as `load_gguf`."""
    file = open_gguf(path)
    config = gguf_config(file)
    architecture = _architecture(file)
    with torch.device("meta"):
        model: Any = _class_of(config)(config)
    filling = _Filling(
        file,
        model,
        architecture,
        _modules_by_name(model, architecture),
        _experts_by_names(model, architecture),
    )
    _check(filling)
    base = model.model
    base.rotary_emb = _rotary(file, base.rotary_emb, config)
    return filling


@dataclass(frozen=True)
class _Filling:
    """A model without weights, and the file that has them.

    Attributes:
        file: the file.
        model: the model, of transformers' class.
        architecture: the file's.
        modules: {name in the file: name in the model} of all modules with weights.
        experts: the same of experts, by the names of gate, up and down.
    """

    file: GgufFile
    model: Any
    architecture: Architecture
    modules: Mapping[str, str]
    experts: Mapping[tuple[str, str, str], str]

    @property
    def is_tied(self) -> bool:
        """Whether the LM head has the embedding's weights."""
        return bool(self.model.config.tie_word_embeddings)

    def order(self, name: str) -> Tensor | None:
        """Return which of the file's outputs is at each place in the model.

        None for the same order. It differs for queries and keys if the file interleaves the halves
        of a head.
        """
        config = self.model.config
        part = name.rpartition(".")[2]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        if part not in heads or not self.architecture.are_halves_interleaved:
            return None
        size = heads[part] * config.head_dim
        return torch.arange(size).view(heads[part], -1, 2).transpose(1, 2).flatten()

    def gain(self, name: str) -> nn.Parameter:
        """Return the weight of a norm."""
        gain = _vector(self.file, f"{name}.weight") - self.architecture.norm_offset
        return nn.Parameter(gain, requires_grad=False)


class _Changes:
    """The matrices whose format was changed: how many, and their bytes before and after."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._file_bytes: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def count(self, tensor: ReaderTensor, change: str, raw: RawMatrix) -> None:
        """Count a tensor of the file that became a matrix. `change` says how, after "matrices"."""
        key = tensor.tensor_type.name, change
        self._counts[key] += 1
        self._file_bytes[key] += int(tensor.n_bytes)
        self._bytes[key] += raw.nbytes

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __str__(self) -> str:
        parts = []
        for key, count in sorted(self._counts.items()):
            type_name, change = key
            noun = "matrix" if count == 1 else "matrices"
            size = f"{self._bytes[key] / 1e6:,.1f} MB"
            file_size = f"{self._file_bytes[key] / 1e6:,.1f} MB in the file"
            parts.append(f"{count} {type_name} {noun} {change} ({size}, {file_size})")
        return ", ".join(parts)


def _architecture(file: GgufFile) -> Architecture:
    """Return a file's architecture. Raises ValueError for one that is not known."""
    architecture = architectures.of_file(file.architecture)
    if architecture is None:
        known = ", ".join(architectures.names())
        raise file.error(f"its architecture is {file.architecture!r}; known are {known}")
    return architecture


def _class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class of a configuration that `gguf_config` made."""
    assert config.architectures
    model_class: type[PreTrainedModel] = getattr(transformers, config.architectures[0])
    return model_class


def _modules_by_name(model: PreTrainedModel, architecture: Architecture) -> dict[str, str]:
    """Return {name in the file: name in the model} of all modules with weights."""
    names = {}
    for place, module in model.named_modules():
        if not list(module.parameters(recurse=False)) or is_experts(module):
            continue
        outer = _OUTER_TENSORS.get(place)
        if outer is not None:
            names[outer] = place
            continue
        _, _, number, inner = place.split(".", 3)  # model.layers.N.inner
        names[f"blk.{number}.{architecture.tensors[inner]}"] = place
    return names


def _experts_by_names(
    model: PreTrainedModel, architecture: Architecture
) -> dict[tuple[str, str, str], str]:
    """Return {names of gate, up and down in the file: name in the model} of all experts."""
    names = {}
    for place, module in model.named_modules():
        if is_experts(module):
            _, _, number, inner = place.split(".", 3)
            gate, up, down = architecture.expert_tensors[inner]
            names[f"blk.{number}.{gate}", f"blk.{number}.{up}", f"blk.{number}.{down}"] = place
    return names


def _expert_shapes(experts: Any) -> dict[str, list[list[int]]]:
    """Return the shapes of the tensors of gate, up and down of experts, and of their biases."""
    count = len(experts.down_proj)
    down_shape = list(experts.down_proj.shape[1:])
    if experts.is_transposed:
        down_shape.reverse()
    width, inner = down_shape
    rows = [[inner, width], [inner, width], [width, inner]]
    shapes = {"weight": [[count, *sizes] for sizes in rows]}
    if experts.has_bias:
        shapes["bias"] = [[count, outputs] for outputs, _ in rows]
    return shapes


def _check(filling: _Filling) -> None:
    """Check that the file has the model's tensors, in the model's shapes, and no others.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape or of a type that `gguf` cannot
            read.
    """
    file = filling.file
    wanted = {}
    for name, place in filling.modules.items():
        module = filling.model.get_submodule(place)
        for part, value in module.named_parameters(recurse=False):
            wanted[f"{name}.{_stored_part(part)}"] = list(value.shape)
    for names, place in filling.experts.items():
        for part, shapes in _expert_shapes(filling.model.get_submodule(place)).items():
            for name, shape in zip(names, shapes, strict=True):
                wanted[f"{name}.{part}"] = shape
    if filling.is_tied:
        del wanted[HEAD]
    rotated = len(filling.model.model.rotary_emb.inv_freq) if _has_tables(file) else 0
    for name in _TABLES:
        if name in file.tensors:
            wanted[name] = [rotated]
    for name, shape in wanted.items():
        stored = file.tensor(name).shape.tolist()[::-1]
        # A matrix of one output is a vector in a file.
        if stored != shape and [1, *stored] != shape:
            raise file.error(f"{name} is {stored}; the sizes in the metadata need {shape}")
        file.check_type(name)
    unknown = sorted(file.tensors.keys() - wanted.keys())
    if unknown:
        raise file.error(
            f"it has a tensor {unknown[0]}, which {type(filling.model).__name__} does not have"
        )


def _stored_part(part: str) -> str:
    """Return what files call a parameter: `bias`, or `weight` for all others."""
    return part if part == "bias" else "weight"


def _has_tables(file: GgufFile) -> bool:
    return any(name in file.tensors for name in _TABLES)


def _fill(filling: _Filling, kind: str | None) -> str | None:
    """Fill in weights for products, in the file's formats or in `kind`.

    Return a line about the matrices whose format was changed, or None.
    """
    file = filling.file
    model = filling.model
    changes = _Changes()
    # The embedding is looked up and not multiplied, so it keeps the file's format.
    embedding = _raw_matrix(file, EMBEDDING, None, changes)
    factor = embedding_factor(model.model.embed_tokens)
    model.model.embed_tokens = StoredEmbedding(embedding, torch.float32, factor)
    title = f"packing {file.path.name}"
    for name, place in tqdm(filling.modules.items(), title, leave=False, disable=None, delay=0.5):
        module = model.get_submodule(place)
        if isinstance(module, nn.Linear):
            linear = _stored_linear(filling, name, module, kind, changes)
            model.set_submodule(place, linear)
        elif f"{name}.weight" != EMBEDDING:
            _fill_module(filling, name, module)
    for names, place in tqdm(filling.experts.items(), title, leave=False, disable=None, delay=0.5):
        experts = _stored_experts(filling, names, model.get_submodule(place), kind, changes)
        model.set_submodule(place, experts)
    return f"{file.path.name}: {changes}" if changes else None


def _fill_module(filling: _Filling, name: str, module: Any) -> None:
    """Fill in a module that is no linear layer: a norm, a router or sinks."""
    for part, value in module.named_parameters(recurse=False):
        if part == "weight" and value.ndim == 1:
            module.weight = filling.gain(name)
        else:
            values = _floats(filling.file, f"{name}.{_stored_part(part)}")
            setattr(module, part, nn.Parameter(values, requires_grad=False))


def _stored_experts(
    filling: _Filling,
    names: Sequence[str],
    experts: Any,
    kind: str | None,
    changes: _Changes,
) -> StoredExperts:
    """Return what stands for experts, with the file's weights in its format or in `kind`."""
    file = filling.file
    count = len(experts.down_proj)
    lists = []
    for name in names:
        tensor = file.tensor(f"{name}.weight")
        raw = _raw_matrix(file, f"{name}.weight", kind, changes)
        biases = _floats(file, f"{name}.bias") if experts.has_bias else [None] * count
        rows = raw.out // count
        parts = [
            RawMatrix(raw.rows[start : start + rows], raw.type) for start in range(0, raw.out, rows)
        ]
        lists.append(
            [StoredLinear(pack(part), bias) for part, bias in zip(parts, biases, strict=True)]
        )
        del raw
        del parts
        file.forget_pages(tensor)
    linears = [ExpertLinears(*parts) for parts in zip(*lists, strict=True)]
    return StoredExperts(linears, expert_activation(experts))


def _fill_bias(filling: _Filling, name: str, module: Any) -> None:
    """Fill in a module's bias, if it has one."""
    if getattr(module, "bias", None) is not None:
        bias = _vector(filling.file, f"{name}.bias", filling.order(name))
        module.bias = nn.Parameter(bias, requires_grad=False)


def _stored_linear(
    filling: _Filling,
    name: str,
    linear: nn.Linear,
    kind: str | None,
    changes: _Changes,
) -> StoredLinear:
    """Return what stands for a linear layer, with the file's weights in its format or in `kind`."""
    file = filling.file
    weight_name = f"{name}.weight"
    is_head = weight_name == HEAD
    if is_head and filling.is_tied:
        weight_name = EMBEDDING
    tensor = file.tensor(weight_name)
    if is_head and kind == "int4" and tensor.tensor_type not in _KEPT["int4"]:
        kind = "int8"
    raw = _raw_matrix(file, weight_name, kind, changes)
    order = filling.order(name)
    if order is not None:
        raw = raw.chosen(order.tolist())
    bias = None if linear.bias is None else _vector(file, f"{name}.bias", order)
    weight = pack(raw, is_head)
    del raw  # because it may hold the file's pages
    file.forget_pages(tensor)
    return StoredLinear(weight, bias)


def _raw_matrix(file: GgufFile, name: str, kind: str | None, changes: _Changes) -> RawMatrix:
    """Return a matrix in the file's format or in `kind`, and count it if that is a change."""
    tensor = file.tensor(name)
    if kind is None and tensor.tensor_type in WIDENED:
        wide = [wide_rows(rows, tensor.tensor_type) for rows in file.rows(tensor)]
        raw = RawMatrix(np.concatenate(wide), WIDENED[tensor.tensor_type])
        changes.count(tensor, "widened without rounding", raw)
        return raw
    if kind is None and tensor.tensor_type not in LIBRARY_FORMATS:
        kind = "int8"
    if kind is None or tensor.tensor_type in _KEPT[kind]:
        outputs = math.prod(tensor.shape[1:].tolist())
        rows = np.asarray(tensor.data).reshape(outputs, -1).view(np.uint8)
        return RawMatrix(rows, tensor.tensor_type)
    if kind == "bfloat16":
        change = "rounded to bfloat16"
    else:
        change = f"stored anew in {kind.removeprefix('int')} bits"
        try:
            check_inputs(int(tensor.shape[0]), name)
        except ValueError as error:
            raise file.error(str(error)) from None
    stored_type = STORED_TYPES[kind]
    parts = [
        RawMatrix.quantised(torch.from_numpy(values), stored_type).rows
        for values in file.floats(tensor)
    ]
    raw = RawMatrix(np.concatenate(parts), stored_type)
    changes.count(tensor, change, raw)
    return raw


def _fill_plain(filling: _Filling) -> None:
    """Fill in weights in float32."""
    file = filling.file
    model = filling.model
    for name, place in filling.modules.items():
        module = model.get_submodule(place)
        order = filling.order(name)
        if f"{name}.weight" == HEAD and filling.is_tied:
            module.weight = model.model.embed_tokens.weight
        elif isinstance(module, nn.Linear):
            weight = _floats(file, f"{name}.weight").view(module.weight.shape)
            module.weight = nn.Parameter(weight if order is None else weight[order])
            _fill_bias(filling, name, module)
        else:
            _fill_module(filling, name, module)
    for names, place in filling.experts.items():
        _fill_experts(file, names, model.get_submodule(place))
    _fill_buffers(model)


def _fill_experts(file: GgufFile, names: Sequence[str], experts: Any) -> None:
    """Fill in transformers' experts in float32."""
    gate, up, down = (_floats(file, f"{name}.weight") for name in names)
    both = join_halves(experts, gate, up)
    if experts.is_transposed:
        both = both.transpose(1, 2).contiguous()
        down = down.transpose(1, 2).contiguous()
    experts.gate_up_proj = nn.Parameter(both, requires_grad=False)
    experts.down_proj = nn.Parameter(down, requires_grad=False)
    if experts.has_bias:
        gate, up, down = (_floats(file, f"{name}.bias") for name in names)
        bias = join_halves(experts, gate, up)
        experts.gate_up_proj_bias = nn.Parameter(bias, requires_grad=False)
        experts.down_proj_bias = nn.Parameter(down, requires_grad=False)


def _floats(file: GgufFile, name: str) -> Tensor:
    """Return a tensor of the file in float32."""
    tensor = file.tensor(name)
    values = np.concatenate(list(file.floats(tensor)))
    return torch.from_numpy(values).view(tensor.shape.tolist()[::-1])


def _fill_buffers(model: Any) -> None:
    """Make the factor of an embedding anew, which was on no device."""
    embedding = model.model.embed_tokens
    factor = embedding_factor(embedding)
    if factor != 1:
        embedding.embed_scale = torch.tensor(factor)


def _vector(file: GgufFile, name: str, order: Tensor | None = None) -> Tensor:
    (rows,) = file.floats(file.tensor(name))
    values = torch.from_numpy(rows[0])
    return values if order is None else values[order]


def _rotary(file: GgufFile, meta: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """Return the rotation. Its frequencies are divided by the file's factors, if it has any.

    Files of Llama 3.1, for example, have such factors.
    """
    rotary: Any = type(meta)(config)
    if _FREQUENCY_FACTORS in file.tensors:
        factors = _vector(file, _FREQUENCY_FACTORS)
        if not bool((factors > 0).all()):
            raise file.error(f"{_FREQUENCY_FACTORS} must be above 0")
        rotary.inv_freq = rotary.inv_freq / factors
        rotary.original_inv_freq = rotary.inv_freq.clone()
    return rotary


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """Return transformers' configuration of a file's model, without reading a tensor.

    Raises:
        ValueError: sizes are missing or contradict each other, or transformers' class does not
            compute the model: experts, scaled rotations, heads that rotate in part.
    """
    architecture = _architecture(file)
    metadata = Metadata(file)
    embedding = file.tensor(EMBEDDING)
    sizes = _checked_sizes(metadata)
    context = metadata.number("context_length", int)
    rope = rotation_of_file(metadata, context)
    rotated = metadata.number("rope.dimension_count", int, sizes.head)
    if rotated != sizes.head:
        if not architecture.may_rotate_parts or not 0 < rotated < sizes.head or rotated % 2:
            raise file.error(
                f"{file.architecture}.rope.dimension_count is {rotated}; "
                f"only {sizes.head}, the size of a head, is supported"
            )
        rope["partial_rotary_factor"] = rotated / sizes.head
    epsilon_name, epsilon_key = architecture.epsilon
    settings: dict[str, Any] = {
        "architectures": [architecture.classes[0]],
        "vocab_size": int(embedding.shape[-1]),
        "hidden_size": sizes.width,
        "intermediate_size": metadata.same_for_all("feed_forward_length"),
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "head_dim": sizes.head,
        epsilon_name: metadata.number(epsilon_key, float),
        "max_position_embeddings": context,
        "rope_parameters": rope,
        "tie_word_embeddings": HEAD not in file.tensors,
        **special_ids(file),
    }
    settings |= architecture.settings(metadata, settings)
    metadata.check_all_read()
    config_class = getattr(transformers, settings["architectures"][0]).config_class
    config: PreTrainedConfig = config_class(**settings, dtype="float32")
    return config


def _checked_sizes(metadata: Metadata) -> _Sizes:
    """Return the sizes of the layers. They are checked before anything of these sizes is made.

    Raises:
        ValueError: the file is damaged: the sizes do not fit together or do not fit its tensors.
    """
    file = metadata.file
    arch = file.architecture
    layers = metadata.number("block_count", int)
    width = metadata.number("embedding_length", int)
    heads = metadata.same_for_all("attention.head_count")
    groups = metadata.same_for_all("attention.head_count_kv", heads)
    size = metadata.number("attention.key_length", int, width // heads)
    if heads % groups or not size or size % 2:
        raise file.error(
            f"{heads} heads of {size}, {groups} of them for keys and values, are not possible"
        )
    stored = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(stored) != layers:
        raise file.error(
            f"it has the tensors of {len(stored)} layers; {arch}.block_count is {layers}"
        )
    for name, count in (("attn_q", heads), ("attn_k", groups), ("attn_v", groups)):
        tensor = file.tensors.get(f"blk.0.{name}.weight")
        outputs = count * size if tensor is None else int(tensor.shape[-1])
        if outputs != count * size:
            needed = f"{count} heads of {size} need {count * size}"
            raise file.error(f"blk.0.{name}.weight has {outputs} outputs; {needed}")
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        value = metadata.number(key, int, size)
        if value != size:
            raise file.error(
                f"{arch}.{key} is {value}; only {size}, the size of a head, is supported"
            )
    return _Sizes(layers, width, heads, groups, size)


def special_ids(file: GgufFile) -> dict[str, Any]:
    """Return the tokens that begin, end and pad a text, by their names in a configuration.

    A token that the file lacks is None. An end of turn and an end of message end a text too: if a
    file has several, `eos_token_id` is a list.
    """
    rows = int(file.tensor(EMBEDDING).shape[-1])
    tokens: dict[str, int | None] = {}
    for name in ("bos", "padding", *_ENDS):
        token = file.value(f"tokenizer.ggml.{name}_token_id", int)
        if token is not None and not 0 <= token < rows:
            raise file.error(f"tokenizer.ggml.{name}_token_id is {token}; there are {rows} tokens")
        tokens[name] = token
    ends = list(dict.fromkeys(tokens[name] for name in _ENDS if tokens[name] is not None))
    return {
        "bos_token_id": tokens["bos"],
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": tokens["padding"],
    }
