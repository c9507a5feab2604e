"""Load a model of transformers' class from a GGUF file.

Its configuration comes from the metadata. Then its weights come tensor by tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from forerun.backends.panels import LIBRARY_FORMATS, RawMatrix, check_inputs, pack
from forerun.backends.stored import STORED_TYPES, StoredEmbedding, StoredLinear
from forerun.zoo.gguf_file import GgufFile, open_gguf

_CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),  # a file's `llama` with a sliding window
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}
# Settings of models that a file calls `llama`, but that have another forward.
_OTHER_FORWARDS = (
    "expert_count",
    "attention.scale",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)
_EMBEDDING = "token_embd.weight"
# What ends a text, by names in the metadata: its end, the end of a turn, and that of a message.
_ENDS = ("eos", "eot", "eom")
_HEAD = "output.weight"  # missing if it is tied to the embedding
_FREQUENCY_FACTORS = "rope_freqs.weight"
# Formats of a file that already have the bits of a weight format.
_KEPT = {"int4": (Type.Q4_0, Type.Q4_1, Type.Q4_K), "int8": (Type.Q8_0,), "bfloat16": (Type.BF16,)}
# Models whose files interleave the rotated halves of queries and keys.
_INTERLEAVED = ("llama", "mistral", "smollm3")


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
            None for the file's formats, with 8 bits for those that the C library does not support.

    Returns:
        The model, and the line, or None if no format was changed.

    Raises:
        ValueError: `open_gguf` or `gguf_config` raises it, or a tensor is missing, unknown, of
            another size or of a type that `gguf` cannot read.
    """
    file = open_gguf(path)
    config = gguf_config(file)
    with torch.device("meta"):
        model: Any = _CLASSES[config.model_type][1](config)
    modules = _modules_by_name(model)
    _check(file, model, modules)
    note = None
    if kind == "float32" or (kind is None and file.is_float):
        _fill_plain(file, model, modules)
    else:
        note = _fill(file, model, modules, kind)
    base = model.model
    base.rotary_emb = _rotary(file, base.rotary_emb, config)
    model.generation_config = GenerationConfig(**special_ids(file))
    config.name_or_path = str(path)
    return model.eval(), note


def _modules_by_name(model: PreTrainedModel) -> dict[str, str]:
    """Return {name in the file: name in the model} of all modules with weights."""
    # Its names cover the whole family.
    known = get_tensor_name_map(MODEL_ARCH.QWEN3, model.config.num_hidden_layers)
    names = {}
    for place, module in model.named_modules():
        if getattr(module, "weight", None) is not None:
            names[str(known.get_name(place))] = place
    return names


def _check(file: GgufFile, model: Any, modules: Mapping[str, str]) -> None:
    """Check that the file has the model's tensors, in the model's shapes, and no others.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape.
    """
    wanted = {}
    for name, place in modules.items():
        for part, value in model.get_submodule(place).named_parameters():
            wanted[f"{name}.{part}"] = list(value.shape)
    if model.config.tie_word_embeddings:
        del wanted[_HEAD]
    if _FREQUENCY_FACTORS in file.tensors:
        wanted[_FREQUENCY_FACTORS] = [model.config.head_dim // 2]
    for name, shape in wanted.items():
        stored = file.tensor(name).shape.tolist()[::-1]
        if stored != shape:
            raise file.error(f"{name} is {stored}; the sizes in the metadata need {shape}")
    unknown = sorted(file.tensors.keys() - wanted.keys())
    if unknown:
        raise file.error(
            f"it has a tensor {unknown[0]}, which {type(model).__name__} does not have"
        )


def _fill(file: GgufFile, model: Any, modules: Mapping[str, str], kind: str | None) -> str | None:
    """Fill in weights for products, in the file's formats or in `kind`.

    Return a line about the matrices whose format was changed, or None.
    """
    changes: Counter[tuple[str, str]] = Counter()
    # The embedding is looked up and not multiplied, so it keeps the file's format.
    embedding = _raw_matrix(file, _EMBEDDING, None, changes)
    model.model.embed_tokens = StoredEmbedding(embedding, torch.float32)
    title = f"packing {file.path.name}"
    for name, place in tqdm(modules.items(), title, leave=False, disable=None, delay=0.5):
        module = model.get_submodule(place)
        if isinstance(module, nn.Linear):
            linear = _stored_linear(file, name, module, model.config, kind, changes)
            model.set_submodule(place, linear)
        elif f"{name}.weight" != _EMBEDDING:
            module.weight = nn.Parameter(_vector(file, f"{name}.weight"), requires_grad=False)
    parts = []
    for (type_name, change), count in sorted(changes.items()):
        noun = "matrix" if count == 1 else "matrices"
        parts.append(f"{count} {type_name} {noun} {change}")
    return f"{file.path.name}: {', '.join(parts)}" if parts else None


def _stored_linear(
    file: GgufFile,
    name: str,
    linear: nn.Linear,
    config: PreTrainedConfig,
    kind: str | None,
    changes: Counter[tuple[str, str]],
) -> StoredLinear:
    """Return what stands for a linear layer, with the file's weights in its format or in `kind`."""
    weight_name = f"{name}.weight"
    is_head = weight_name == _HEAD
    if is_head and config.tie_word_embeddings:
        weight_name = _EMBEDDING
    tensor = file.tensor(weight_name)
    if is_head and kind == "int4" and tensor.tensor_type not in _KEPT["int4"]:
        kind = "int8"
    raw = _raw_matrix(file, weight_name, kind, changes)
    order = _order(name, config)
    if order is not None:
        raw = raw.chosen(order.tolist())
    bias = None if linear.bias is None else _vector(file, f"{name}.bias", order)
    weight = pack(raw, is_head)
    del raw  # because it may hold the file's pages
    file.forget_pages(tensor)
    return StoredLinear(weight, bias)


def _raw_matrix(
    file: GgufFile, name: str, kind: str | None, changes: Counter[tuple[str, str]]
) -> RawMatrix:
    """Return a matrix in the file's format or in `kind`, and count it if that is a change."""
    tensor = file.tensor(name)
    if kind is None and tensor.tensor_type not in LIBRARY_FORMATS:
        kind = "int8"
    if kind is None or tensor.tensor_type in _KEPT[kind]:
        rows = np.asarray(tensor.data).reshape(int(tensor.shape[1]), -1).view(np.uint8)
        return RawMatrix(rows, tensor.tensor_type)
    if kind == "bfloat16":
        change = "rounded to bfloat16"
    else:
        change = f"stored anew in {kind.removeprefix('int')} bits"
        try:
            check_inputs(int(tensor.shape[0]), name)
        except ValueError as error:
            raise file.error(str(error)) from None
    changes[tensor.tensor_type.name, change] += 1
    stored_type = STORED_TYPES[kind]
    parts = [
        RawMatrix.quantised(torch.from_numpy(values), stored_type).rows
        for values in file.floats(tensor)
    ]
    return RawMatrix(np.concatenate(parts), stored_type)


def _fill_plain(file: GgufFile, model: Any, modules: Mapping[str, str]) -> None:
    """Fill in weights in float32."""
    for name, place in modules.items():
        module = model.get_submodule(place)
        order = _order(name, model.config)
        if f"{name}.weight" == _HEAD and model.config.tie_word_embeddings:
            module.weight = model.model.embed_tokens.weight
        else:
            values = np.concatenate(list(file.floats(file.tensor(f"{name}.weight"))))
            weight = torch.from_numpy(values).view(module.weight.shape)
            module.weight = nn.Parameter(weight if order is None else weight[order])
        if getattr(module, "bias", None) is not None:
            module.bias = nn.Parameter(_vector(file, f"{name}.bias", order))


def _order(name: str, config: PreTrainedConfig) -> Tensor | None:
    """Return which of the file's outputs is at each place in the model, or None for the same order.

    It differs for queries and keys if the file interleaves the halves of a head.
    """
    part = name.rpartition(".")[2]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
    if heads is None or config.model_type not in _INTERLEAVED:
        return None
    return torch.arange(heads * config.head_dim).view(heads, -1, 2).transpose(1, 2).flatten()


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
    arch = file.architecture
    for key in _OTHER_FORWARDS:
        if file.value(f"{arch}.{key}", float, 0.0) not in (0, 1):
            raise file.error(f"it has {arch}.{key}, which is not supported")
    embedding = file.tensor(_EMBEDDING)
    sizes = _checked_sizes(file)
    context = file.own("context_length", int)
    settings: dict[str, Any] = {
        "vocab_size": int(embedding.shape[-1]),
        "hidden_size": sizes.width,
        "intermediate_size": file.own("feed_forward_length", int),
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "head_dim": sizes.head,
        "rms_norm_eps": file.own("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": context,
        "rope_parameters": _rotation(file),
        "tie_word_embeddings": _HEAD not in file.tensors,
        **special_ids(file),
    }
    model_type = arch
    window = file.own("attention.sliding_window", int, context)
    if window < context:
        if arch != "llama":
            raise file.error(
                f"it has {arch}.attention.sliding_window, which is supported for llama only"
            )
        model_type = "mistral"
        settings["sliding_window"] = window
    elif arch != "qwen2":  # qwen2 always has these biases
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if model_type in ("llama", "smollm3"):
        settings["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    config_class, model_class = _CLASSES[model_type]
    return config_class(**settings, architectures=[model_class.__name__], dtype="float32")


def _checked_sizes(file: GgufFile) -> _Sizes:
    """Return the sizes of the layers. They are checked before anything of these sizes is made.

    Raises:
        ValueError: the file is damaged: the sizes do not fit together or do not fit its tensors.
    """
    arch = file.architecture
    layers = file.own("block_count", int)
    width = file.own("embedding_length", int)
    heads = file.own("attention.head_count", int)
    groups = file.own("attention.head_count_kv", int, heads)
    size = file.own("attention.key_length", int, width // heads)
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
        outputs = int(file.tensor(f"blk.0.{name}.weight").shape[-1])
        if outputs != count * size:
            needed = f"{count} heads of {size} need {count * size}"
            raise file.error(f"blk.0.{name}.weight has {outputs} outputs; {needed}")
    for key in ("attention.value_length", "rope.dimension_count"):
        value = file.own(key, int, size)
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
    rows = int(file.tensor(_EMBEDDING).shape[-1])
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


def _rotation(file: GgufFile) -> dict[str, Any]:
    theta = file.own("rope.freq_base", float, 10000.0)
    arch = file.architecture
    kind = file.value(f"{arch}.rope.scaling.type", str, "linear")
    # Some files say a factor of 0 for no scaling.
    factor = file.value(f"{arch}.rope.scaling.factor", float, 0.0) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "linear" or not factor > 0:
        raise file.error(
            f"its rotation is scaled ({kind!r}, {factor:g}); only none and linear are supported"
        )
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
